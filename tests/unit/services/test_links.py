"""ControlLink sockets and a stage of the ring, inside one process."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from dflash_wire.codec import (
    decode_drafts,
    decode_plan,
    decode_result,
    encode_plan,
    encode_result,
)
from dflash_wire.errors import (
    EngineUnavailableError,
    ExecutorLostError,
    ExecutorsReplacedError,
    InvalidRequestError,
    error_from_wire,
    error_to_wire,
)
from dflash_wire.records import DraftResult, Ingest, Row, StepPlan, StepResult
from services import links
from services.config import LinkArgs
from services.engine_group import ZmqRing
from services.executors import ERROR, PLAN, RingStage, StepGate
from services.links import Inbound, Outbound

pytestmark = pytest.mark.unit

WAIT_MS = 30_000
KINDS = ["ipc", "tcp"]


@pytest.fixture
def inbound() -> Iterator[Inbound]:
    socket = Inbound("ipc", 1.0)
    yield socket
    socket.close()


@pytest.mark.parametrize("kind", KINDS)
def test_messages_arrive_whole_and_in_order(kind: str) -> None:
    inbound = Inbound(kind, 1.0)
    outbound = Outbound(inbound.address)
    messages = [[b"a", bytes([i]), b""] for i in range(20)]
    for message in messages:
        outbound.send(message)
    assert [inbound.receive(WAIT_MS) for _ in messages] == messages
    outbound.close()
    inbound.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="abstract names are Linux's")
def test_ipc_leaves_no_file(inbound: Inbound) -> None:
    assert inbound.address.startswith("ipc://@")


def test_tcp_stays_on_this_machine_without_ray() -> None:
    inbound = Inbound("tcp", 1.0)
    assert inbound.address.startswith("tcp://127.0.0.1:")
    inbound.close()


def test_receive_gives_up(inbound: Inbound) -> None:
    assert inbound.receive(1) is None


def test_a_peer_that_takes_nothing_is_an_error() -> None:
    """Never a wait: the sender is the step loop."""
    outbound = Outbound("ipc://@dflash-test-nobody")
    with pytest.raises(EngineUnavailableError, match="does not take"):
        for _ in range(100_000):
            outbound.send([b"step"])
    outbound.close()


Handler = Callable[[list[bytes]], list[bytes] | None]


class Stage:
    """A ``RingStage`` with both its neighbours."""

    def __init__(self, handler: Handler) -> None:
        self.after = Inbound("ipc", 1.0)
        self.stage = RingStage(handler, LinkArgs(), 1)
        self.before = Outbound(self.stage.address)
        self.stage.connect(self.after.address)

    def exchange(self, message: list[bytes]) -> list[bytes]:
        self.before.send(message)
        answer = self.after.receive(WAIT_MS)
        assert answer is not None
        return answer

    def close(self) -> None:
        self.stage.stop()
        self.before.close()
        self.after.close()


@pytest.fixture
def make_stage() -> Iterator[Callable[[Handler], Stage]]:
    stages: list[Stage] = []

    def make(handler: Handler) -> Stage:
        stages.append(Stage(handler))
        return stages[-1]

    yield make
    for stage in stages:
        stage.close()


def plan_message(step_id: int) -> list[bytes]:
    return [PLAN, encode_plan(StepPlan(step_id, [])), bytes([0])]


def test_stage_passes_on_what_its_handler_returns(make_stage: Callable[[Handler], Stage]) -> None:
    stage = make_stage(lambda message: [*message, b"drafts"])
    for step_id in range(3):
        message = plan_message(step_id)
        assert stage.exchange(message) == [*message, b"drafts"]


@pytest.mark.parametrize(
    ("raised", "code", "text"),
    [
        (InvalidRequestError("no", "seed"), "invalid_value", "no"),
        (EngineUnavailableError("later"), "engine_unavailable", "later"),
        (ZeroDivisionError("a bug"), "engine_failed", "ZeroDivisionError: a bug"),
    ],
)
def test_handler_errors_become_messages_and_the_stage_goes_on(
    make_stage: Callable[[Handler], Stage],
    caplog: pytest.LogCaptureFixture,
    raised: Exception,
    code: str,
    text: str,
) -> None:
    errors = [raised]

    def handler(message: list[bytes]) -> list[bytes]:
        if errors:
            raise errors.pop()
        return message

    stage = make_stage(handler)
    with caplog.at_level(logging.CRITICAL, "services.executors"):
        kind, frame, route = stage.exchange(plan_message(41))
    assert route == bytes([0])
    result = decode_result(frame)
    assert (kind, result.step_id, result.committed_token_ids) == (ERROR, 41, [])
    assert result.error is not None
    back = error_from_wire(result.error)
    assert (back.code, str(back)) == (code, text)
    assert stage.stage.is_alive()
    assert stage.exchange(plan_message(42)) == plan_message(42)


def test_errors_of_earlier_stages_pass_untouched(make_stage: Callable[[Handler], Stage]) -> None:
    handled: list[list[bytes]] = []
    stage = make_stage(lambda message: handled.append(message) or message)
    failed = [ERROR, encode_result(StepResult(5, [], error={"code": "engine_failed"}))]
    assert stage.exchange(failed) == failed
    assert handled == []


def test_stage_sets_its_own_thread_count(make_stage: Callable[[Handler], Stage]) -> None:
    counts: list[int] = []

    def handler(message: list[bytes]) -> list[bytes]:
        counts.append(torch.get_num_threads())
        return message

    make_stage(handler).exchange(plan_message(1))
    assert counts == [1]


@pytest.mark.parametrize("is_connected", [True, False])
def test_stop_ends_the_thread(is_connected: bool) -> None:
    stage = RingStage(lambda message: message, LinkArgs(), 1)
    after = Inbound("ipc", 1.0)
    if is_connected:
        stage.connect(after.address)
    stage.stop()
    assert not stage.is_alive()
    after.close()


@pytest.mark.timeout(60)
def test_a_stage_that_cannot_listen_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = Inbound("tcp", 1.0)
    monkeypatch.setattr(links, "bind_inbound", lambda socket, kind: socket.bind(taken.address))
    with pytest.raises(EngineUnavailableError, match="cannot listen: Address already in use"):
        RingStage(lambda message: message, LinkArgs(), 1)
    taken.close()


def test_late_steps_do_not_pass_the_gate() -> None:
    gate = StepGate()
    assert [gate.admits(step_id) for step_id in (0, 1, 5, 3, 5, 6)] == [True] * 3 + [False] * 2 + [
        True
    ]


def test_a_handler_can_end_a_steps_way(make_stage: Callable[[Handler], Stage]) -> None:
    stage = make_stage(lambda message: None if message == plan_message(1) else message)
    stage.before.send(plan_message(1))
    assert stage.exchange(plan_message(2)) == plan_message(2)


def test_a_step_starts_where_its_work_is() -> None:
    """Only steps with something to draft or ingest go through the drafter."""
    drafter, verifier = Inbound("ipc", 1.0), Inbound("ipc", 1.0)
    ring = ZmqRing(LinkArgs())
    ring.connect([drafter.address], verifier.address)
    answers = Outbound(ring.address)
    plans = [
        StepPlan(1, [Row(0, [5], 4, [0])]),
        StepPlan(2, [Row(0, [5], 4, [0], width=4)]),
        StepPlan(3, [Row(0, [5], 4, [0])], [Ingest(0, 1, 3, [0])]),
        StepPlan(4, [Row(0, [5, 6], 0, [0], is_prefill=True)]),
    ]
    for plan, stage in zip(plans, (verifier, drafter, drafter, verifier), strict=True):
        answers.send([PLAN, encode_result(StepResult(plan.step_id, [[1]]))])
        ring.send(plan)
        assert ring.receive(plan.step_id).step_id == plan.step_id
        message = stage.receive(WAIT_MS)
        assert message is not None
        assert decode_plan(message[1]) == plan
        if stage is verifier:
            assert decode_drafts(message[3]) == DraftResult(plan.step_id, [[]])
    for socket in (drafter, verifier, answers, ring):
        socket.close()


def test_no_step_overtakes_another_on_the_short_way() -> None:
    drafter, verifier = Inbound("ipc", 1.0), Inbound("ipc", 1.0)
    ring = ZmqRing(LinkArgs())
    ring.connect([drafter.address], verifier.address)
    answers = Outbound(ring.address)
    ring.send(StepPlan(1, [Row(0, [5], 4, [0], width=4)]))
    ring.send(
        StepPlan(2, [Row(1, [5], 4, [1])])
    )  # nothing to draft, but step 1 is with the drafter
    for step_id in (1, 2):
        message = drafter.receive(WAIT_MS)
        assert message is not None and decode_plan(message[1]).step_id == step_id
        answers.send([PLAN, encode_result(StepResult(step_id, [[1]]))])
        assert ring.receive(step_id).step_id == step_id
    ring.send(StepPlan(3, [Row(1, [5], 4, [1])]))
    message = verifier.receive(WAIT_MS)
    assert message is not None and decode_plan(message[1]).step_id == 3
    for socket in (drafter, verifier, answers, ring):
        socket.close()


def test_two_steps_in_flight_take_the_same_way() -> None:
    """A verifier that was busy takes what waits by sender, not by time: step 2 could come first."""
    drafter = Inbound("ipc", 1.0)
    ring = ZmqRing(LinkArgs())
    ring.connect([drafter.address], drafter.address)
    ring.send(StepPlan(1, [Row(0, [5], 4, [0])], num_cohorts=2))
    ring.send(StepPlan(2, [Row(1, [5], 4, [1], width=4)], num_cohorts=2))
    for step_id in (1, 2):
        message = drafter.receive(WAIT_MS)
        assert message is not None and decode_plan(message[1]).step_id == step_id
        assert message[2] == bytes([0, 0])  # lane 0, and drafter 0 to visit
    ring.close()
    drafter.close()


def test_results_of_given_up_steps_are_dropped() -> None:
    ring = ZmqRing(LinkArgs())
    answers = Outbound(ring.address)
    for step_id in (4, 5, 6):
        answers.send([PLAN, encode_result(StepResult(step_id, [[1]]))])
    assert ring.receive(6).step_id == 6
    answers.close()
    ring.close()


class Replacement:
    """A ring between executors that are about to be lost and those that take their place."""

    def __init__(self) -> None:
        self.old, self.new = Inbound("ipc", 1.0), Inbound("ipc", 1.0)
        self.ring = ZmqRing(LinkArgs(step_timeout_s=60))
        self.ring.connect([], self.old.address)
        self.answers = Outbound(self.ring.address)

    def answer(self, step_id: int, error: Exception | None = None) -> None:
        wire = None if error is None else error_to_wire(error)
        self.answers.send([PLAN, encode_result(StepResult(step_id, [[1]], error=wire))])

    def close(self) -> None:
        for socket in (self.old, self.new, self.answers, self.ring):
            socket.close()


@pytest.fixture
def replacement() -> Iterator[Replacement]:
    one = Replacement()
    yield one
    one.close()


def plain_step(step_id: int) -> StepPlan:
    return StepPlan(step_id, [Row(0, [5], 4, [0])])


@pytest.mark.parametrize("waits_in", ["receive", "send"])
def test_a_ring_tells_once_that_executors_are_new(replacement: Replacement, waits_in: str) -> None:
    ring = replacement.ring
    ring.send(plain_step(1))
    ring.await_replacement()
    ring.replace([], replacement.new.address)
    with pytest.raises(ExecutorsReplacedError):
        if waits_in == "receive":
            ring.receive(1)
        else:
            ring.send(plain_step(2))
    ring.send(plain_step(3))
    replacement.answer(1)  # of the old ones, late
    replacement.answer(3)
    assert ring.receive(3).step_id == 3
    message = replacement.new.receive(WAIT_MS)
    assert message is not None and decode_plan(message[1]).step_id == 3


def test_steps_for_lost_executors_are_dropped(replacement: Replacement) -> None:
    ring = replacement.ring
    ring.await_replacement()
    ring.send(plain_step(1))
    assert replacement.old.receive(1) is None
    ring.mark_lost("no room for others")
    with pytest.raises(EngineUnavailableError, match="no room"):
        ring.receive(1)


def test_a_step_that_failed_with_its_executor_waits_for_the_next_one(
    replacement: Replacement,
) -> None:
    ring = replacement.ring
    ring.send(plain_step(1))
    replacement.answer(1, ExecutorLostError("a rank of the target is gone"))
    timer = threading.Timer(0.2, ring.replace, ([], replacement.new.address))
    timer.start()
    with pytest.raises(ExecutorsReplacedError):
        ring.receive(1)
    timer.join()


def test_a_step_of_before_the_loss_still_lands(replacement: Replacement) -> None:
    ring = replacement.ring
    ring.send(plain_step(1))
    replacement.answer(1)
    ring.await_replacement()
    assert ring.receive(1).committed_token_ids == [[1]]
