"""``python -m services.offline`` from the command line to the output file, with a fake engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from dflash_wire.errors import EngineUnavailableError
from dflash_wire.ports import EngineLimits
from dflash_wire.records import GenerationRequest, TokenChunk
from gateway.chat_tokenizer import ChatTokenizer
from services import offline
from services.config import AppArgs

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]
LIMITS = EngineLimits(
    num_pages=64,
    page_size=16,
    max_step_positions=64,
    max_rows=4,
    max_context=256,
    max_draft_block_size=16,
)
GOOD = [{"id": f"q{i}", "question": f"How many pens are {i} pens?"} for i in range(6)]


class FakeEngine:
    """Answers every request with its own prompt.

    Args:
        fails_at: number of the request, from 1, that ends in an error.
        kills_at: number of the request at which the process dies as by ``kill -9``.
    """

    def __init__(self, fails_at: int = 0, kills_at: int = 0) -> None:
        self.limits = LIMITS
        self.requests: list[GenerationRequest] = []
        self.is_closed = False
        self._fails_at = fails_at
        self._kills_at = kills_at

    def make(self, args: AppArgs) -> FakeEngine:
        """Stand in for ``LocalEngine(args)``."""
        return self

    def generate(self, request: GenerationRequest) -> Iterator[TokenChunk]:
        self.requests.append(request)
        if len(self.requests) == self._kills_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if len(self.requests) == self._fails_at:
            raise EngineUnavailableError("The engine is away; try again.")
        yield TokenChunk(request.request_id, request.prompt_token_ids, "length")

    def close(self) -> None:
        self.is_closed = True


class Batch:
    """A prompts file, its output, and runs on them."""

    def __init__(self, folder: Path) -> None:
        self.prompts = folder / "prompts.jsonl"
        self.output = folder / "out.jsonl"

    def write(self, *rows: dict[str, Any] | str) -> None:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        self.prompts.write_text("".join(line + "\n" for line in lines), encoding="utf-8")

    def command(self, *options: str) -> list[str]:
        paths = ["--prompts", str(self.prompts), "--output", str(self.output)]
        return [*paths, "--config", str(ROOT / "config.yaml"), "--concurrency", "1", *options]

    def run(self, engine: FakeEngine, *options: str) -> int:
        return offline.main(self.command(*options), engine.make)

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_bytes().splitlines()]


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    return Batch(tmp_path)


def test_answers_every_row(batch: Batch, capsys: pytest.CaptureFixture[str]) -> None:
    batch.write(*GOOD)
    engine = FakeEngine()
    assert batch.run(engine, "--concurrency", "3", "--max-tokens", "9", "--top-k", "-1") == 0
    assert sorted(row["id"] for row in batch.rows()) == [row["id"] for row in GOOD]
    assert all("pens" in row["text"] for row in batch.rows())
    assert {request.max_tokens for request in engine.requests} == {9}
    assert {request.sampling.top_k for request in engine.requests} == {0}
    assert "6 answered, 0 failed" in capsys.readouterr().err
    assert engine.is_closed


def test_bad_rows_cost_only_themselves(batch: Batch, capsys: pytest.CaptureFixture[str]) -> None:
    bad = [
        {"id": "b0", "messages": "hello"},
        {"id": "b1", "messages": [{"role": "user"}]},
        {"id": "b2", "prompt": "\ud800"},
        {"id": "b3", "messages": [{"role": "user", "content": [{"type": "\ud800"}]}]},
    ]
    batch.write(bad[0], GOOD[0], *bad[1:], GOOD[1])
    for num_answered in (2, 0):  # the second run tries the errors again, and only them
        engine = FakeEngine()
        assert batch.run(engine) == 1
        assert len(engine.requests) == num_answered
        assert engine.is_closed
        assert f"{num_answered} answered, 4 failed" in capsys.readouterr().err
        rows = {row["id"]: row for row in batch.rows()}
        assert len(rows) == len(batch.rows()) == 6
        assert {name for name, row in rows.items() if "error" in row} == {"b0", "b1", "b2", "b3"}
    assert rows["b1"]["error"] == {
        "code": "invalid_value",
        "message": "messages[0].content is required.",
    }


def test_an_answer_replaces_the_error_of_an_earlier_run(batch: Batch) -> None:
    batch.write(*GOOD)
    assert batch.run(FakeEngine(fails_at=2)) == 1
    assert [row["id"] for row in batch.rows() if "error" in row] == ["q1"]
    engine = FakeEngine()
    assert batch.run(engine) == 0
    assert [request.request_id for request in engine.requests] == ["q1-0"]
    assert sorted(row["id"] for row in batch.rows()) == [row["id"] for row in GOOD]
    assert not any("error" in row for row in batch.rows())


def test_unexpected_exception_costs_one_row(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    encode_texts = ChatTokenizer.encode_texts

    async def encode(self: ChatTokenizer, texts: list[str]) -> list[list[int]]:
        if texts == ["bug"]:
            raise KeyError("content")
        return await encode_texts(self, texts)

    monkeypatch.setattr(ChatTokenizer, "encode_texts", encode)
    batch.write({"id": "bad", "prompt": "bug"}, {"id": "good", "prompt": "pens"})
    assert batch.run(FakeEngine()) == 1
    bad, good = batch.rows()
    assert bad["error"] == {"code": "internal_error", "message": "KeyError: 'content'"}
    assert good["text"] == "pens"


@pytest.mark.parametrize("row", ["hello", '{"id": "\\ud800", "prompt": "x"}'])
def test_unusable_input_changes_nothing(
    batch: Batch, row: str, capsys: pytest.CaptureFixture[str]
) -> None:
    batch.write(GOOD[0], row)
    kept = b'{"id": "q0", "text": "x"}\n{"id": "q1", "te'
    batch.output.write_bytes(kept)
    assert offline.main(batch.command(), unexpected_engine) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"offline: {batch.prompts}:2 ") and message.count("\n") == 1
    assert batch.output.read_bytes() == kept


def test_foreign_output_changes_nothing(batch: Batch, capsys: pytest.CaptureFixture[str]) -> None:
    batch.write(*GOOD)
    batch.output.write_text("precious notes without newline")
    assert offline.main(batch.command(), unexpected_engine) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"offline: {batch.output}:1 ") and message.count("\n") == 1
    assert batch.output.read_text() == "precious notes without newline"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--policy", "static:99"), "Unknown block policy 'static:99'"),
        (("--config", "missing.yaml"), "cannot read missing.yaml"),
    ],
)
def test_wrong_configuration_is_found_before_the_models_load(
    batch: Batch, options: tuple[str, str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    batch.write(*GOOD)
    assert offline.main(batch.command(*options), unexpected_engine) == 2
    assert words in capsys.readouterr().err
    assert not batch.output.exists()


def unexpected_engine(args: AppArgs) -> FakeEngine:
    raise AssertionError("the models were loaded")


def test_a_full_disk_ends_the_batch_in_one_message(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def open_full(path: Path, retried_ids: set[str]) -> BinaryIO:
        return Path("/dev/full").open("ab", buffering=0)

    monkeypatch.setattr(offline, "open_output", open_full)
    batch.write(*GOOD)
    engine = FakeEngine()
    assert batch.run(engine) == 2
    assert engine.is_closed
    assert f"offline: cannot write {batch.output}: No space left" in capsys.readouterr().err


KILLED_RUN = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("test_offline", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.offline.main(sys.argv[2:], module.FakeEngine(kills_at=4).make)
"""


def test_killed_run_is_resumed(batch: Batch) -> None:
    batch.write(*GOOD[:2], {"id": "bad", "messages": "hello"}, *GOOD[2:])
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_RUN, __file__, *batch.command()],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto")])},
        capture_output=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    before = batch.output.read_bytes()
    assert [row["id"] for row in batch.rows()] == ["q0", "q1", "bad", "q2"]
    # As if the last line had only half reached the disk.
    batch.output.write_bytes(before[:-30])
    engine = FakeEngine()
    assert batch.run(engine) == 1
    ids = [request.request_id for request in engine.requests]
    assert ids == ["q2-0", "q3-0", "q4-0", "q5-0"]
    assert sorted(row["id"] for row in batch.rows()) == sorted(["bad", *(r["id"] for r in GOOD)])
    assert batch.output.read_bytes().startswith(b"".join(before.splitlines(keepends=True)[:2]))
    assert batch.run(FakeEngine()) == 1


def test_nothing_to_do_needs_no_models(batch: Batch, capsys: pytest.CaptureFixture[str]) -> None:
    batch.write(*GOOD)
    assert batch.run(FakeEngine()) == 0
    before = batch.output.read_bytes()
    assert offline.main(batch.command(), unexpected_engine) == 0
    assert "nothing to do" in capsys.readouterr().err
    assert batch.output.read_bytes() == before
