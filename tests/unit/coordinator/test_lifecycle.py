"""Submitting, refusing, cancelling, closing; statistics and snapshots."""

from __future__ import annotations

from dataclasses import replace

import pytest
from coordinator_fakes import Bench, make_limits, make_request
from toy_target import always_wrong, half_right

from dflash_wire.errors import (
    ConfigError,
    ContextLengthError,
    EngineUnavailableError,
    InvalidRequestError,
    OverloadedError,
    error_from_wire,
)
from dflash_wire.records import GenerationRequest, StepPlan
from gateway.coordinator import Coordinator


@pytest.mark.parametrize(
    ("request_", "error", "param"),
    [
        (make_request("r", 0), InvalidRequestError, None),
        (make_request("r", 5, 0), InvalidRequestError, "max_tokens"),
        (make_request("r", 5, -3), InvalidRequestError, "max_tokens"),
        (make_request("r", 64), ContextLengthError, None),
        (make_request("r", 30, 12), ContextLengthError, "max_tokens"),
        (make_request("r", policy="static:1"), InvalidRequestError, "dflash.policy"),
        (make_request("r", policy=""), InvalidRequestError, "dflash.policy"),
    ],
)
def test_refusals(request_: GenerationRequest, error: type[Exception], param: str | None) -> None:
    bench = Bench(make_limits(num_pages=10, max_context=64))  # 40 slots
    with pytest.raises(error) as caught:
        bench.submit(request_)
    assert type(caught.value) is error
    assert caught.value.param == param  # type: ignore[attr-defined]
    assert not bench.step()
    bench.check_empty()


def test_longest_request_that_fits_is_served() -> None:
    bench = Bench(make_limits(num_pages=10, max_context=64))
    bench.submit(make_request("r", 30, 10))
    bench.run_until_idle()
    bench.check_all_finished()


def test_duplicate_id_is_refused_while_live_only() -> None:
    bench = Bench()
    bench.submit(make_request("r", max_tokens=2))
    with pytest.raises(InvalidRequestError):
        bench.submit(make_request("r"))
    bench.run_until_idle()
    bench.coordinator.submit(make_request("r"))


def test_overload() -> None:
    bench = Bench(make_limits(max_rows=1), max_waiting=2)
    bench.submit(make_request("r0"))
    bench.submit(make_request("r1"))
    with pytest.raises(OverloadedError):
        bench.submit(make_request("r2"))
    bench.step()
    bench.submit(make_request("r2"))
    with pytest.raises(OverloadedError):
        bench.submit(make_request("r3"))
    bench.run_until_idle()
    bench.check_all_finished()


@pytest.mark.parametrize(
    "changes",
    [
        *({"num_pages": 0}, {"page_size": 0}, {"max_rows": 0}, {"max_context": 1}),
        *({"max_step_positions": 15}, {"max_draft_block_size": 0}),
    ],
)
def test_impossible_limits(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        Bench(make_limits(**changes))


@pytest.mark.parametrize("policy", ["static:17", "adapt", ""])
def test_impossible_default_policy(policy: str) -> None:
    with pytest.raises(ConfigError):
        Bench(policy=policy)


def test_impossible_queue() -> None:
    with pytest.raises(ConfigError):
        Bench(max_waiting=0)


def test_request_policy_overrides_the_default() -> None:
    bench = Bench(policy="static:8")
    bench.submit(make_request("a", policy="off"))
    bench.submit(make_request("b"))
    bench.run_until_idle()
    rows = [row for plan in bench.ring.plans for row in plan.rows if not row.is_prefill]
    widths = [[row.width for row in rows if row.seq_id == seq_id] for seq_id in (0, 1)]
    assert set(widths[0]) == {1}
    assert widths[1][0] == 8


def test_cancel_while_waiting_running_and_unknown() -> None:
    bench = Bench(make_limits(max_rows=1))
    bench.submit(make_request("running", max_tokens=50))
    bench.submit(make_request("waiting", seed=1))
    bench.submit(make_request("untaken", seed=2))
    bench.coordinator.cancel("untaken")
    bench.step()
    num_chunks = len(bench.sink.chunks["running"])
    for request_id in ("running", "waiting", "unknown", "running"):
        bench.coordinator.cancel(request_id)
    assert not bench.step()
    bench.check_empty()
    assert len(bench.sink.chunks["running"]) == num_chunks
    assert set(bench.sink.chunks) == {"running"}
    assert bench.coordinator.snapshot().totals.num_cancelled == 3


def test_cancel_during_a_step_publishes_nothing_and_frees_its_pages() -> None:
    bench = Bench()
    bench.submit(make_request("gone", max_tokens=50))
    bench.submit(make_request("stays", seed=1))
    bench.step()
    num_chunks = len(bench.sink.chunks["gone"])
    bench.ring.on_run = lambda plan: bench.coordinator.cancel("gone")
    bench.step()
    bench.ring.on_run = lambda plan: None
    assert len(bench.ring.plans[-1].rows) == 2
    assert len(bench.sink.chunks["gone"]) == num_chunks
    bench.step()
    assert [row.seq_id for row in bench.ring.plans[-1].rows] == [1]
    assert len(bench.ring.plans[-1].ingests) == 1
    del bench.requests["gone"]
    bench.run_until_idle()
    bench.check_all_finished()


def test_cancelled_id_is_free_at_once() -> None:
    bench = Bench()
    bench.submit(make_request("r", 5, 50, seed=1))
    bench.step()
    bench.coordinator.cancel("r")
    bench.sink.chunks.clear()
    bench.sink.addresses.clear()
    bench.submit(make_request("r", 9, 12, seed=2))
    bench.run_until_idle()
    bench.check_all_finished()


def test_id_reused_during_the_last_step_of_its_cancelled_owner() -> None:
    bench = Bench()
    bench.submit(make_request("r", 5, 1))

    def replace_request(plan: StepPlan) -> None:
        bench.ring.on_run = lambda plan: None
        bench.coordinator.cancel("r")
        bench.submit(make_request("r", 9, 12, seed=2))

    bench.ring.on_run = replace_request
    bench.step()
    with pytest.raises(InvalidRequestError):
        bench.coordinator.submit(make_request("r"))
    bench.run_until_idle()
    bench.check_all_finished()


def test_close_ends_live_requests_and_refuses_new_ones() -> None:
    bench = Bench(make_limits(max_rows=1))
    bench.submit(make_request("running", max_tokens=50))
    bench.submit(make_request("waiting"))
    bench.step()
    bench.coordinator.close()
    with pytest.raises(EngineUnavailableError):
        bench.submit(make_request("late"))
    assert not bench.step()
    for request_id in ("running", "waiting"):
        error = bench.sink.last(request_id).error
        assert error is not None
        assert isinstance(error_from_wire(error), EngineUnavailableError)
    bench.check_empty()
    assert bench.coordinator.snapshot().is_closed


class StepClock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def overheads(bench: Bench, request_id: str) -> list[float]:
    return [c.cycle.overhead_ms for c in bench.sink.chunks[request_id] if c.cycle is not None]


def test_times_of_a_cycle() -> None:
    clock = StepClock()
    bench = Bench(drafter=always_wrong, policy="static:4", clock=clock)
    bench.ring.draft_ms, bench.ring.verify_ms = 2.0, 5.0

    def run_takes_8_ms(plan: StepPlan) -> None:
        clock.now += 0.008

    def publish_takes_3_ms() -> None:
        clock.now += 0.003

    bench.ring.on_run = run_takes_8_ms
    bench.sink.on_publish = publish_takes_3_ms
    bench.submit(make_request("r", 5, 4))
    bench.run_until_idle()
    stats = bench.sink.stats("r")
    assert stats.num_cycles == 3
    assert (stats.draft_ms, stats.verify_ms) == (6.0, 15.0)
    # Each cycle waits 8 ms for 7 ms of work; the last two begin with publishing the one before.
    assert overheads(bench, "r") == pytest.approx([1.0, 4.0, 4.0])
    totals = bench.coordinator.snapshot().totals
    assert totals.ring_ms == pytest.approx(4 * 8.0)
    assert (totals.draft_ms, totals.verify_ms) == (8.0, 20.0)


def test_a_cycle_is_not_charged_for_steps_without_its_sequence() -> None:
    clock = StepClock()
    limits = make_limits(max_step_positions=17)
    bench = Bench(limits, always_wrong, "static:16", clock=clock)
    bench.ring.draft_ms, bench.ring.verify_ms = 2.0, 5.0

    def run_takes_8_ms(plan: StepPlan) -> None:
        clock.now += 0.008

    bench.ring.on_run = run_takes_8_ms
    bench.sink.on_publish = lambda: setattr(clock, "now", clock.now + 0.003)
    for i in range(2):
        bench.submit(make_request(f"r{i}", 5, 40, seed=i))
    for _ in range(9):
        bench.step()
    # Only one draft block fits a step, so the two take turns.
    assert [[row.seq_id for row in plan.rows] for plan in bench.ring.plans[-4:]] in (
        [[0], [1], [0], [1]],
        [[1], [0], [1], [0]],
    )
    for i in range(2):
        assert overheads(bench, f"r{i}") == pytest.approx([1.0] * len(overheads(bench, f"r{i}")))


def test_snapshot_counts() -> None:
    bench = Bench(make_limits(max_rows=2), half_right, "static:4")
    for i in range(3):
        bench.submit(make_request(f"r{i}", 5, 21, seed=i))
    assert bench.coordinator.snapshot().num_waiting == 3
    bench.step()
    snapshot = bench.coordinator.snapshot()
    assert (snapshot.num_running, snapshot.num_waiting) == (2, 1)
    assert snapshot.num_free_pages < snapshot.num_pages == 256
    bench.run_until_idle()
    totals = bench.coordinator.snapshot().totals
    stats = [bench.sink.stats(f"r{i}") for i in range(3)]
    assert totals.num_steps == len(bench.ring.plans)
    assert totals.num_finished == 3
    assert totals.num_committed_tokens == 63
    assert totals.num_prefill_tokens == 15
    assert totals.num_cycle_tokens == 60
    assert totals.num_cycles == sum(s.num_cycles for s in stats)
    assert totals.num_draft_tokens == sum(s.num_draft_tokens for s in stats)
    assert totals.num_accepted_drafts == sum(s.num_accepted_drafts for s in stats)
    assert sum(totals.accepted_drafts_by_position) == totals.num_accepted_drafts
    assert totals.accepted_drafts_by_position[0] > totals.accepted_drafts_by_position[1] == 0


def test_snapshot_is_a_copy() -> None:
    bench = Bench()
    before = bench.coordinator.snapshot()
    copy = replace(before.totals, accepted_drafts_by_position=[0] * 15)
    bench.submit(make_request("r"))
    bench.run_until_idle()
    assert before.totals == copy


def test_exported_name_is_the_class() -> None:
    assert isinstance(Bench().coordinator, Coordinator)
