"""Messages of several lanes and drafters on the ring, inside one process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from dflash_wire.codec import decode_drafts, decode_result, encode_drafts, encode_plan
from dflash_wire.records import DraftResult, Ingest, Row, StepPlan
from services.config import LinkArgs
from services.engine_group import ZmqRing
from services.engines import taps_within, union_taps
from services.executors import ERROR, PLAN, RingStage, passed_on
from services.links import Inbound, Message, Outbound

pytestmark = pytest.mark.unit

WAIT_MS = 30_000


def plan_message(step_id: int, *route: int) -> Message:
    return [PLAN, encode_plan(StepPlan(step_id, [])), bytes(route)]


@pytest.fixture
def peers() -> Iterator[list[Inbound]]:
    sockets = [Inbound("ipc", 1.0) for _ in range(3)]
    yield sockets
    for socket in sockets:
        socket.close()


def received(peer: Inbound) -> Message:
    message = peer.receive(WAIT_MS)
    assert message is not None
    return message


def test_a_step_begins_at_its_first_drafter_with_its_route(peers: list[Inbound]) -> None:
    ring = ZmqRing(LinkArgs(), lane=4)
    ring.connect([peers[0].address, peers[1].address], peers[2].address)
    wide, plain = Row(0, [5], 4, [0], width=4, drafter=1), Row(1, [5], 4, [1])
    plans = [
        (StepPlan(1, [plain]), 2, bytes([4])),
        (StepPlan(2, [wide]), 1, bytes([4, 1])),
        (StepPlan(3, [wide], [Ingest(0, 1, 3, [0], drafter=0)]), 0, bytes([4, 0, 1])),
    ]
    answers = Outbound(ring.address)
    for plan, first, route in plans:
        ring.send(plan)
        kind, _, sent_route, *_ = received(peers[first])
        assert (kind, sent_route) == (PLAN, route)
    answers.close()
    ring.close()


def test_a_drafter_adds_its_drafts_and_leaves_the_route() -> None:
    first = DraftResult(7, [[1, 2], [], []], 0.5, began_s=20.0)
    second = DraftResult(7, [[], [3], []], 0.25, began_s=30.0)
    message = passed_on(plan_message(7, 2, 0, 1), first)
    assert message[2] == bytes([2, 1])
    message = passed_on(message, second)
    assert message[2] == bytes([2])
    assert decode_drafts(message[3]) == DraftResult(7, [[1, 2], [3], []], 0.75, began_s=20.0)
    assert message[:2] == plan_message(7)[:2]


def test_answers_go_to_the_peer_that_the_route_names(peers: list[Inbound]) -> None:
    stage = RingStage(lambda message: message, LinkArgs(), 1, lambda message: message[2][0])
    stage.connect(*(peer.address for peer in peers))
    before = Outbound(stage.address)
    for lane in (2, 0, 1, 1):
        before.send(plan_message(lane, lane))
        assert received(peers[lane]) == plan_message(lane, lane)
    stage.stop()
    before.close()


class Drafter:
    """A stage that is busy with its first message until the test lets it go on."""

    def __init__(self, peer: Inbound, poison: int = -1) -> None:
        self.poison = poison
        self.batches: list[int] = []
        self.is_busy, self.may_go_on = threading.Event(), threading.Event()
        self.stage = RingStage(
            lambda message: self.together([message])[0],
            LinkArgs(),
            1,
            together=self.together,
            most_together=4,
        )
        self.stage.connect(peer.address)
        self.before = Outbound(self.stage.address)

    def together(self, messages: list[Message]) -> list[Message]:
        self.batches.append(len(messages))
        self.is_busy.set()
        assert self.may_go_on.wait(30)
        if any(message == plan_message(self.poison, 0) for message in messages):
            raise ValueError("a bad step")
        return messages

    def send_while_busy(self, step_ids: range) -> None:
        """Step 0 keeps it busy; the others have arrived before it goes on."""
        self.before.send(plan_message(0, 0))
        assert self.is_busy.wait(30)
        for step_id in step_ids:
            self.before.send(plan_message(step_id, 0))
        self.may_go_on.set()

    def close(self) -> None:
        self.stage.stop()
        self.before.close()


def test_steps_that_wait_share_a_pass(peers: list[Inbound]) -> None:
    drafter = Drafter(peers[0])
    drafter.send_while_busy(range(1, 8))
    assert [received(peers[0]) for _ in range(8)] == [plan_message(i, 0) for i in range(8)]
    assert drafter.batches[0] == 1
    # Sending to an idle process takes time, so the last ones may come late, but not all of them.
    assert sum(drafter.batches) == 8 and 1 < max(drafter.batches) <= 4
    drafter.close()


def test_one_bad_step_does_not_fail_those_that_share_its_pass(
    peers: list[Inbound], caplog: pytest.LogCaptureFixture
) -> None:
    drafter = Drafter(peers[0], poison=2)
    with caplog.at_level(logging.CRITICAL, "services.executors"):
        drafter.send_while_busy(range(1, 4))
        answers = [received(peers[0]) for _ in range(4)]
    kinds = [kind for kind, _, _ in answers]
    assert kinds == [PLAN, PLAN, ERROR, PLAN]
    assert decode_result(answers[2][1]).step_id == 2
    assert answers[2][2] == bytes([0])
    assert drafter.stage.is_alive()
    drafter.close()


def test_errors_leave_out_the_drafters_that_are_left(
    peers: list[Inbound], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(message: Message) -> Message:
        raise ValueError("broken")

    stage = RingStage(fail, LinkArgs(), 1, lambda message: len(message[2]) - 1)
    stage.connect(*(peer.address for peer in peers))
    before = Outbound(stage.address)
    with caplog.at_level(logging.CRITICAL, "services.executors"):
        before.send(plan_message(3, 5, 0, 1))
        kind, _, route = received(peers[0])
    assert (kind, route) == (ERROR, bytes([5]))
    stage.stop()
    before.close()


def test_the_feature_pool_holds_every_tapped_layer_once() -> None:
    union = union_taps([[5, 1, 9], [1, 3], [5, 1, 9]])
    assert union == [5, 1, 9, 3]
    assert taps_within(union, [1, 3]) == [1, 3]
    assert taps_within(union, [5, 1, 9]) == [0, 1, 2]
    # Alone, or all with the same taps: rows are read as they are.
    assert taps_within(union_taps([[5, 1, 9]] * 2), [5, 1, 9]) is None


def test_nothing_to_draft_is_nothing_to_merge() -> None:
    plan = StepPlan(1, [Row(0, [5], 4, [0])])
    drafts = DraftResult.nothing(plan)
    assert drafts.merged(drafts) == drafts
    assert decode_drafts(encode_drafts(drafts)) == drafts
