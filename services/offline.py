"""Batches without HTTP: ``python -m services.offline --prompts FILE.jsonl --output OUT.jsonl``.

Each input line is a JSON object with ``id`` (optional) and one of ``messages``, ``prompt`` or
``question``. Results are appended as they finish, one JSON object a line; a second run skips what is
already there, so an interrupted batch goes on where it stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dflash_wire.errors import ConfigError, DFlashError
from dflash_wire.records import GenerationRequest, GenerationStats, SamplingParams
from gateway.chat_tokenizer import ChatTokenizer
from gateway.detokenize import SequenceText
from services.local import LocalEngine
from services.settings import gateway_settings
from services.yaml_args import read_app_args


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One input row."""

    id: str
    messages: list[dict[str, str]] | None
    prompt: str


def read_items(path: Path) -> list[BatchItem]:
    """Read the input file.

    Raises:
        ConfigError: a line is not an object with a prompt, or an id occurs twice.
    """
    items: list[BatchItem] = []
    seen: set[str] = set()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}:{number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{path}:{number} is not a JSON object")
        prompt = row.get("prompt")
        messages = row.get("messages")
        if messages is None and prompt is None and "question" in row:
            messages = [{"role": "user", "content": str(row["question"])}]
        if messages is None and not isinstance(prompt, str):
            raise ConfigError(f"{path}:{number} has none of messages, prompt, question")
        item_id = str(row.get("id", f"line-{number}"))
        if item_id in seen:
            raise ConfigError(f"{path}:{number} repeats the id {item_id!r}")
        seen.add(item_id)
        items.append(BatchItem(item_id, messages, prompt or ""))
    return items


def finished_ids(output: Path) -> set[str]:
    """Ids that are already answered; cuts a half-written last line off the file."""
    if not output.exists():
        return set()
    data = output.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        output.write_bytes(whole)
    rows = [json.loads(line) for line in whole.splitlines() if line.strip()]
    return {row["id"] for row in rows if "error" not in row}


class BatchRunner:
    """Runs items on a ``LocalEngine`` and appends their results.

    Owner of the output file for the time of the run.
    """

    def __init__(
        self,
        engine: LocalEngine,
        tokenizer: ChatTokenizer,
        options: argparse.Namespace,
        eos: list[int],
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._options = options
        self._eos = eos
        self._lock = threading.Lock()

    def run(self, items: list[BatchItem], output: Path) -> int:
        """Answer all items; returns how many failed."""
        num_failed = 0
        with (
            output.open("a", encoding="utf-8") as sink,
            ThreadPoolExecutor(self._options.concurrency) as pool,
            tqdm(total=len(items), unit="prompt", file=sys.stderr) as bar,
        ):

            def one(item: BatchItem) -> bool:
                row = self._answer(item)
                with self._lock:
                    sink.write(json.dumps(row, ensure_ascii=False) + "\n")
                    sink.flush()
                    bar.update()
                return "error" in row

            for failed in pool.map(one, items):
                num_failed += failed
        return num_failed

    def _answer(self, item: BatchItem) -> dict[str, Any]:
        began = time.perf_counter()
        try:
            return self._generate(item, began)
        except DFlashError as error:
            return {"id": item.id, "error": {"code": error.code, "message": error.message}}

    def _generate(self, item: BatchItem, began: float) -> dict[str, Any]:
        tokenizer, options = self._tokenizer, self._options
        if item.messages is not None:
            prompt_ids = asyncio.run(tokenizer.encode_chat(item.messages))
        else:
            (prompt_ids,) = asyncio.run(tokenizer.encode_texts([item.prompt]))
        room = self._engine.limits.max_context - len(prompt_ids)
        request = GenerationRequest(
            item.id,
            prompt_ids,
            max(1, min(options.max_tokens, room)),
            SamplingParams(options.temperature, options.top_p, options.top_k, options.seed),
            self._eos,
            options.policy,
        )
        output = SequenceText(tokenizer.new_detokenizer(), [], self._eos)
        text, finish_reason, stats = "", "", GenerationStats()
        for chunk in self._engine.generate(request):
            text += output.push(chunk.token_ids)
            if chunk.cycle is not None:
                stats.add(chunk.cycle)
            if chunk.finish_reason is not None:
                text += output.finish(chunk.finish_reason)
                finish_reason = chunk.finish_reason
        return {
            "id": item.id,
            "text": text,
            "finish_reason": finish_reason,
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": output.num_tokens,
            "acceptance_length": round(stats.acceptance_length, 3),
            "seconds": round(time.perf_counter() - began, 3),
        }


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True, help="input JSONL")
    parser.add_argument("--output", type=Path, help="output JSONL (default: PROMPTS.out.jsonl)")
    parser.add_argument("--config", type=Path, default=Path("config.yaml"))
    parser.add_argument("--policy", help="off or static:<w>; default from the config")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=8, help="prompts in flight")
    return parser.parse_args(arguments)


def _todo(options: argparse.Namespace, output: Path) -> Iterator[BatchItem]:
    done = finished_ids(output)
    yield from (item for item in read_items(options.prompts) if item.id not in done)


def main(arguments: list[str] | None = None) -> int:
    """Run a batch; returns the exit status (1 when a prompt failed)."""
    options = parse_arguments(arguments)
    output = options.output or options.prompts.with_suffix(".out.jsonl")
    try:
        items = list(_todo(options, output))
        if not items:
            print(f"nothing to do: every prompt is answered in {output}", file=sys.stderr)
            return 0
        args = read_app_args(options.config)
        engine = LocalEngine(args)
    except (DFlashError, OSError) as error:
        print(f"offline: {error}", file=sys.stderr)
        return 2
    settings = gateway_settings(args, engine.spec)
    tokenizer = ChatTokenizer.load(engine.spec.target_path)
    runner = BatchRunner(engine, tokenizer, options, list(settings.eos_token_ids))
    num_failed = runner.run(items, output)
    engine.close()
    print(f"{len(items) - num_failed} answered, {num_failed} failed: {output}", file=sys.stderr)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
