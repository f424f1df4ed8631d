"""Batches without HTTP: ``python -m services.offline --prompts FILE.jsonl --output OUT.jsonl``.

Each input line is a JSON object with ``id`` (optional) and one of ``messages``, ``prompt`` or
``question``; beside them it may have any field of a request to the HTTP API. Results are appended as they
finish, one JSON object a line; a second run skips what is already there and tries errors again, so an
interrupted batch goes on where it stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from tqdm import tqdm

from dflash_wire.errors import DFlashError, FatalError
from gateway.chat_tokenizer import ChatTokenizer
from gateway.coordinator.policy import parse_policy
from services.config import AppArgs
from services.grammar_checker import GrammarChecker
from services.local import LocalEngine
from services.offline_answers import BatchEngine, RowAnswerer, one_at_a_time
from services.offline_input import BatchItem, parse_arguments, read_items
from services.offline_output import encode_row, open_output, read_rows
from services.settings import gateway_settings
from services.spec import make_spec
from services.yaml_args import read_app_args


class BatchRunner:
    """Runs items on an engine and writes their results.

    Owner of the output for the time of the run.
    """

    def __init__(self, answerer: RowAnswerer, concurrency: int) -> None:
        self._answerer = answerer
        self._concurrency = concurrency
        self._lock = threading.Lock()

    def run(self, items: Sequence[BatchItem], sink: BinaryIO) -> int:
        """Answer all items; returns how many failed.

        Raises:
            OSError: a result could not be written; the remaining items are given up.
        """
        num_failed = 0
        with (
            ThreadPoolExecutor(self._concurrency) as pool,
            tqdm(total=len(items), unit="prompt", file=sys.stderr) as bar,
        ):

            def one(item: BatchItem) -> bool:
                row = self._answer(item)
                with self._lock:
                    sink.write(encode_row(row))
                    sink.flush()
                    bar.update()
                return "error" in row

            for failed in pool.map(one, items):
                num_failed += failed
        return num_failed

    def _answer(self, item: BatchItem) -> dict[str, Any]:
        began = time.perf_counter()
        try:
            answer = asyncio.run(self._answerer.answer(item.id, item.row))
            return {"id": item.id, **answer, "seconds": round(time.perf_counter() - began, 3)}
        except DFlashError as error:
            return {"id": item.id, "error": {"code": error.code, "message": error.message}}
        except Exception as error:
            # Whatever one row sets off, a chat template's own bug say, must not cost the others.
            message = f"{type(error).__name__}: {error}"
            return {"id": item.id, "error": {"code": DFlashError.code, "message": message}}


def main(
    arguments: list[str] | None = None,
    make_engine: Callable[[AppArgs], BatchEngine] = LocalEngine,
) -> int:
    """Run a batch.

    Returns:
        The exit status: 1 when a prompt failed, 2 when the batch could not run.
    """
    options = parse_arguments(arguments)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("services.step_costs").setLevel(logging.INFO)  # it may take a while
    try:
        finished = {row.id for row in read_rows(options.output) if not row.is_error}
        items = [item for item in read_items(options.prompts) if item.id not in finished]
        if not items:
            print(f"nothing to do: every prompt is answered in {options.output}", file=sys.stderr)
            return 0
        num_failed = _run_batch(items, options, make_engine)
    except (DFlashError, OSError) as error:
        print(f"offline: {error}", file=sys.stderr)
        return 2
    num_answered = len(items) - num_failed
    print(f"{num_answered} answered, {num_failed} failed: {options.output}", file=sys.stderr)
    return 1 if num_failed else 0


def _run_batch(
    items: Sequence[BatchItem],
    options: argparse.Namespace,
    make_engine: Callable[[AppArgs], BatchEngine],
) -> int:
    # Everything that can be wrong is looked at before the models, which take long to load.
    args = read_app_args(options.config)
    spec = make_spec(args)
    settings = gateway_settings(args, spec)
    if options.policy is not None:
        drafter = settings.all_drafters[0]
        parse_policy(options.policy, drafter.max_draft_block_size, settings.max_tree_positions)
        engine_args = args.engine.model_copy(update={"policy": options.policy})
        args = args.model_copy(update={"engine": engine_args})
    tokenizer = ChatTokenizer.load(spec.target_path)
    engine = make_engine(args)
    checker = GrammarChecker(spec.target_path, settings.vocab_size)
    try:
        defaults = {
            "temperature": options.temperature,
            "top_p": options.top_p,
            "top_k": options.top_k,
            "seed": options.seed,
        }
        check = one_at_a_time(checker.check)
        answerer = RowAnswerer(engine, tokenizer, settings, defaults, options.max_tokens, check)
        runner = BatchRunner(answerer, options.concurrency)
        with open_output(options.output, {item.id for item in items}) as sink:
            return runner.run(items, sink)
    except OSError as error:
        raise FatalError(
            f"cannot write {options.output}: {error.strerror}; solve that, then run again to go on"
        ) from error
    finally:
        checker.close()
        engine.close()


if __name__ == "__main__":
    sys.exit(main())
