"""Grammars that nobody could bear end as a sentence, in a bounded time, and the next one is served."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_wire.errors import EngineUnavailableError, OverloadedError
from services import grammar_checker
from services.grammar_checker import TOO_MUCH, GrammarChecker

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]

TARGET = Path(__file__).resolve().parents[3] / "models/demo/target"
GOOD = {"type": "json_schema", "json_schema": {"type": "object", "properties": {"a": {}}}}


def tag(form: dict[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": form})


def ebnf(text: str) -> str:
    return tag({"type": "grammar", "grammar": text})


def regex(pattern: str) -> str:
    return tag({"type": "regex", "pattern": pattern})


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    made = GrammarChecker(str(TARGET), 3072)
    yield made
    made.close()


def nested(depth: int) -> str:
    return '{"type":"object","properties":{"a":' * depth + "{}" + "}}" * depth


HOSTILE = {
    "deep parentheses": regex("(" * 20_000 + "a" + ")" * 20_000),
    "deep rules": ebnf("root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "a schema of 20,000 levels": '{"type":"structural_tag","format":'
    f'{{"type":"json_schema","json_schema":{nested(20_000)}}}}}',
    "many optional properties": tag(
        {
            "type": "json_schema",
            "json_schema": {
                "type": "object",
                "properties": {f"p{i}": {"type": "string"} for i in range(2000)},
            },
        }
    ),
    "a long enumeration": tag(
        {"type": "json_schema", "json_schema": {"enum": [f"value {i}" for i in range(60_000)]}}
    ),
    "repeats of repeats": regex("((a{1,100}){1,100}){1,100}"),
    "an ambiguous grammar": ebnf('root ::= root root | "a" | ""'),
    "a rule of itself": ebnf("root ::= root"),
    "what no text is": regex("[^\\x00-\\U0010FFFF]"),
    "a reference to itself": tag({"type": "json_schema", "json_schema": {"$ref": "#"}}),
    "no JSON": "{",
}


DEADLY = {"many optional properties", "a long enumeration"}
"""Those over which a worker dies."""


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_grammars_end_as_a_sentence(name: str, checker: GrammarChecker) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    problem = await checker.check(HOSTILE[name])
    ticking.cancel()
    assert problem, name
    assert (problem == TOO_MUCH) == (name in DEADLY)
    assert len(problem) < 400
    assert ticks > 1, "the event loop went on"
    # Asked again, it costs nothing, and others are served.
    worker = checker._worker
    assert await checker.check(HOSTILE[name]) == problem
    assert checker._worker is worker
    assert await checker.check(tag(GOOD)) is None


async def test_a_worker_that_was_killed_is_replaced(checker: GrammarChecker) -> None:
    assert await checker.check(tag(GOOD)) is None
    first = checker._worker
    assert first is not None
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert await checker.check(regex("x{3}")) is None
    assert checker._worker is not first


async def test_the_queue_is_bounded(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checker, "MOST_WAITING", 2)
    asked = [checker.check(regex(f"y{{{i}}}")) for i in range(1, 6)]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert answers[:2] == [None, None]
    assert all(isinstance(answer, OverloadedError) for answer in answers[2:])


async def test_no_worker_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    broken = GrammarChecker(str(tmp_path), 3072)
    with pytest.raises(EngineUnavailableError):
        await broken.check(tag(GOOD))
    broken.close()
