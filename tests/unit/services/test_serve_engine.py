"""What the gateway makes of a coordinator's chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dflash_wire.errors import EngineUnavailableError, error_to_wire
from dflash_wire.records import TokenChunk
from services.serve_engine import ServeEngine, _complete

pytestmark = pytest.mark.unit


def read(*chunks: TokenChunk) -> list[list[int]]:
    async def source() -> AsyncIterator[TokenChunk]:
        for chunk in chunks:
            yield chunk

    async def scenario() -> list[list[int]]:
        return [chunk.token_ids async for chunk in _complete(source())]

    return asyncio.run(scenario())


def test_chunks_that_follow_each_other_pass() -> None:
    chunks = (TokenChunk("r", [1]), TokenChunk("r", [2, 3], num_before=1))
    assert read(*chunks, TokenChunk("r", [4], "stop", num_before=3)) == [[1], [2, 3], [4]]


@pytest.mark.parametrize("num_before", [0, 2, 4])
def test_a_hole_is_an_error(num_before: int) -> None:
    with pytest.raises(EngineUnavailableError, match="tokens were lost"):
        read(TokenChunk("r", [1]), TokenChunk("r", [2, 3], "stop", num_before=num_before))


class Groups:
    """Stands where the coordinators' handle does; every group gives one of ``answers``."""

    def __init__(self, *answers: Any) -> None:
        self._answers = answers

    def broadcast(self, method: str) -> Groups:
        assert method in ("check_ready", "snapshot")
        return self

    async def results_async(self, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert timeout_s > 0 and return_exceptions
        if "late" in self._answers:
            raise TimeoutError
        return list(self._answers)


def engine_over(*answers: Any) -> ServeEngine:
    return ServeEngine(Groups(*answers), "ipc")  # type: ignore[arg-type]


LOST = error_to_wire(EngineUnavailableError("the drafter is gone"))


@pytest.mark.parametrize("answers", [(None,), (LOST, None), (RuntimeError("died"), None)])
def test_one_group_that_can_serve_is_enough(answers: tuple[Any, ...]) -> None:
    asyncio.run(engine_over(*answers).check_ready())


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ((), "no engine group"),
        ((RuntimeError("died"),), "no engine group"),
        (("late",), "no engine group"),
        ((LOST,), "drafter is gone"),
    ],
)
def test_no_group_that_can_serve_is_unready(answers: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(EngineUnavailableError, match=reason):
        asyncio.run(engine_over(*answers).check_ready())


def test_gauges_of_the_groups_that_answer() -> None:
    snapshot = {
        "group": "a",
        "num_running": 3,
        "num_waiting": 1,
        "num_pages": 64,
        "num_free_pages": 52,
        "num_idle_pages": 20,
        "num_preemptions": 5,
        "num_steps": 700,
        "num_failed_steps": 0,
    }
    (gauges,) = asyncio.run(engine_over(snapshot, RuntimeError("died")).gauges())
    assert (gauges.group, gauges.num_held_pages, gauges.num_idle_pages) == ("a", 12, 20)
    assert asyncio.run(engine_over(snapshot, "late").gauges()) == []
