"""What a gateway asks every engine group: readiness and gauges."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dflash_wire.errors import EngineUnavailableError, error_to_wire
from services.route_hints import RouteHints
from services.serve_engine import ServeEngine

pytestmark = pytest.mark.unit


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
    hints = RouteHints(page_size=16, expected_output_tokens=50)
    return ServeEngine(Groups(*answers), "ipc", hints)  # type: ignore[arg-type]


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
        "num_outstanding_tokens": 900,
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
