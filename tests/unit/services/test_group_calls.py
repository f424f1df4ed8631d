"""What a gateway asks every engine group: readiness and gauges."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentBroadcastResponse

from dflash_wire.errors import EngineUnavailableError, InvalidRequestError, error_to_wire
from dflash_wire.gauges import GUIDED_COUNTS, SchedulerGauges
from services import serve_engine
from services.route_hints import RouteHints
from services.serve_engine import ServeEngine

pytestmark = pytest.mark.unit


LATE = object()
SCHEDULER = SchedulerGauges("plain", 2, 1.1, 0.9, 0.2, [0.8, 0.6], [0, 5, 1])


CALLS = (("check_ready",), ("snapshot",), ("decisions", 7), ("set_policy", "off"))


class Group:
    """One group's call."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def get_async(self) -> Any:
        if self._answer is LATE:
            await asyncio.Event().wait()
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer


class Groups:
    """Stands where the coordinators' handle does; every group gives one of ``answers``."""

    def __init__(self, *answers: Any) -> None:
        self._answers = answers

    def broadcast(self, method: str, *arguments: Any) -> DeploymentBroadcastResponse:
        assert (method, *arguments) in CALLS
        return DeploymentBroadcastResponse(self._send(), asyncio.get_running_loop())

    async def _send(self) -> list[Any]:
        if not self._answers:
            raise DeploymentUnavailableError(DeploymentID("Coordinator", "test"))
        return [Group(answer) for answer in self._answers]


def engine_over(*answers: Any) -> ServeEngine:
    hints = RouteHints(page_size=16, expected_output_tokens=50)
    return ServeEngine(Groups(*answers), "ipc", hints)  # type: ignore[arg-type]


LOST = error_to_wire(EngineUnavailableError("the drafter is gone"))


@pytest.mark.parametrize("answers", [(None,), (LOST, None), (RuntimeError("died"), None)])
def test_one_group_that_can_serve_is_enough(answers: tuple[Any, ...]) -> None:
    asyncio.run(engine_over(*answers).check_ready())


def test_nobody_waits_for_a_group_that_hangs_when_another_can_serve() -> None:
    asyncio.run(asyncio.wait_for(engine_over(LATE, None, LATE).check_ready(), 4.0))


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ((), "no engine group"),
        ((RuntimeError("died"),), "no engine group"),
        ((LATE,), "no engine group"),
        ((LATE, LOST), "drafter is gone"),
        ((LOST,), "drafter is gone"),
    ],
)
def test_no_group_that_can_serve_is_unready(
    answers: tuple[Any, ...], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_engine, "READY_TIMEOUT_S", 0.05)
    with pytest.raises(EngineUnavailableError, match=reason):
        asyncio.run(engine_over(*answers).check_ready())


def test_gauges_of_the_groups_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_engine, "GAUGES_TIMEOUT_S", 0.05)
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
        "guided": {"num_guided_tokens": 9, "num_forced_tokens": 4, "num_written_drafts": 2},
        "schedulers": [list(SCHEDULER)],  # a tuple here; lists come out of other serializers
    }
    (gauges,) = asyncio.run(engine_over(snapshot, RuntimeError("died")).gauges())
    assert (gauges.group, gauges.num_held_pages, gauges.num_idle_pages) == ("a", 12, 20)
    assert gauges.schedulers == (SCHEDULER,)
    assert [getattr(gauges, name) for name in GUIDED_COUNTS] == [9, 4, 2]
    (gauges,) = asyncio.run(engine_over(LATE, snapshot).gauges())
    assert gauges.group == "a"


def test_decisions_of_the_groups_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_engine, "GAUGES_TIMEOUT_S", 0.05)
    engine = engine_over({"a/0": ["1"], "a/1": ["2"]}, RuntimeError("died"), LATE, {"b/0": []})
    assert asyncio.run(engine.decisions(7)) == {"a/0": ["1"], "a/1": ["2"], "b/0": []}
    assert asyncio.run(engine_over().decisions(7)) == {}


REFUSED = error_to_wire(InvalidRequestError("no such policy", "dflash.policy"))


def test_a_policy_is_set_in_every_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_engine, "READY_TIMEOUT_S", 0.05)
    assert asyncio.run(engine_over(None, None).set_policy("off")) == 2
    assert asyncio.run(engine_over(None, RuntimeError("died"), LATE).set_policy("off")) == 1
    with pytest.raises(InvalidRequestError, match="no such policy"):
        asyncio.run(engine_over(None, REFUSED).set_policy("off"))
    for answers in ((), (RuntimeError("died"),), (LATE,)):
        with pytest.raises(EngineUnavailableError, match="no engine group"):
            asyncio.run(engine_over(*answers).set_policy("off"))
