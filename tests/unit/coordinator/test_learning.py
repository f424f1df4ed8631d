"""Lessons are learned in order, off the driver's path, and a failing one costs nobody his answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from coordinator_fakes import Bench, make_request
from test_scheduled import Failing, priced

from gateway.coordinator.block_scheduler.records import RowOutcome, StepOutcome
from gateway.coordinator.block_scheduler.scheduler import BlockScheduler
from gateway.coordinator.learning import Learning


class Recording(BlockScheduler):
    """Notes what it is told, by whom, and can be held up."""

    def __init__(self) -> None:
        of = priced()
        super().__init__(of.survival, of.cost, of.table)
        self.told: list[object] = []
        self.threads: set[str] = set()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def observe(self, outcome: StepOutcome) -> None:
        self.may_go_on.wait()
        self.threads.add(threading.current_thread().name)
        self.told.append(outcome.num_rows)

    def forget(self, seq_id: int) -> None:
        self.told.append(f"forget {seq_id}")

    def prepare(self) -> None:
        self.told.append("prepare")


def lesson(num_rows: int) -> Callable[[], StepOutcome]:
    rows = [RowOutcome(1, "", 4, 3, 3)]
    return lambda: StepOutcome(None, rows, num_rows, 4, 0, 10, 1, 4, 0.5, 5.0, 6.0)


@contextmanager
def in_thread(scheduler: BlockScheduler) -> Iterator[Learning]:
    learning = Learning(scheduler)
    learning.start_thread()
    yield learning
    learning.close()


def test_lessons_are_learned_in_order_and_by_another_thread() -> None:
    of = Recording()
    with in_thread(of) as learning:
        learning.add(lesson(1))
        learning.add(7)
        learning.add(lesson(2))
        assert of.told == []
        learning.start()
        assert learning.settled() is of
        assert of.told == [1, "forget 7", 2, "prepare"]
        assert of.threads == {"learning"}
        learning.start()
        assert learning.settled() is of
        assert len(of.told) == 4, "nothing new, so nothing to learn"


def test_an_outcome_that_cannot_be_put_together_costs_only_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken() -> StepOutcome:
        raise ValueError("no outcome")

    of = Recording()
    with in_thread(of) as learning:
        learning.add(broken)
        learning.add(lesson(2))
        learning.start()
        learning.settled()
    assert of.told == [2, "prepare"]
    assert caplog.text.count("cannot learn") == 1


def test_the_driver_waits_for_what_is_being_learned() -> None:
    of = Recording()
    with in_thread(of) as learning:
        of.may_go_on.clear()
        learning.add(lesson(1))
        learning.start()
        settled = threading.Thread(target=learning.settled)
        settled.start()
        assert of.told == []
        assert settled.is_alive()
        of.may_go_on.set()
        settled.join(timeout=10)
        assert of.told == [1, "prepare"]


def test_a_failing_scheduler_ends_neither_the_thread_nor_the_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    of = priced()
    with in_thread(Failing(of.survival, of.cost, of.table)) as learning:
        for _ in range(2):
            learning.add(lesson(1))
            learning.add(1)
            learning.start()
            learning.settled()
    assert caplog.text.count("cannot learn") == 4


@pytest.mark.parametrize("has_thread", [False, True])
def test_a_scheduler_knows_all_that_was_served_and_nobody_who_has_ended(has_thread: bool) -> None:
    of = priced()
    bench = Bench(policy="adaptive", scheduler=of)
    if has_thread:
        bench.coordinator.learning.start_thread()
    for i in range(6):
        bench.submit(make_request(f"r{i}", 5, 40, seed=i))
    bench.run_until_idle()
    bench.coordinator.learning.start()
    assert bench.coordinator.learning.settled() is of
    assert of.survival.num_requests == 0
    assert of.survival.brier_score < 0.3
    bench.coordinator.close()
    bench.coordinator.step()


def test_a_closed_coordinator_leaves_no_thread_behind() -> None:
    bench = Bench(policy="adaptive", scheduler=priced())
    before = set(threading.enumerate())
    bench.coordinator.learning.start_thread()
    (thread,) = set(threading.enumerate()) - before
    bench.coordinator.close()
    bench.coordinator.step()
    thread.join(timeout=10)
    assert not thread.is_alive()
