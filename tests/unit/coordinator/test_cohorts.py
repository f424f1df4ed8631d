"""Two steps in flight: who is in which, what happens when one of them fails, and when it pays."""

from __future__ import annotations

from itertools import pairwise

import pytest
from coordinator_fakes import Bench, make_limits, make_request
from toy_target import DRAFTERS, always_wrong

from dflash_wire.errors import EngineUnavailableError
from dflash_wire.records import StepPlan, StepResult
from gateway.coordinator.cohorts import PROBE_EVERY, WARM_UP_STEPS, WINDOW_STEPS, CohortChooser

BOTH = (1, 2)


def fail(plan: StepPlan, result: StepResult) -> StepResult:
    raise EngineUnavailableError("lost")


def verified(plan: StepPlan) -> set[int]:
    return {row.seq_id for row in plan.rows if not row.is_prefill}


def start(bench: Bench, num_requests: int, max_tokens: int = 40) -> None:
    """Submit and step until all are decoding."""
    for i in range(num_requests):
        bench.submit(make_request(f"r{i}", 4, max_tokens, seed=i))
    while len(bench.sink.chunks) < num_requests:
        bench.step()


@pytest.mark.parametrize("drafter", sorted(DRAFTERS))
@pytest.mark.parametrize("policy", ["off", "static:2", "static:8"])
def test_output_is_the_same(drafter: str, policy: str) -> None:
    bench = Bench(drafter=DRAFTERS[drafter], policy=policy, cohorts=(2,))
    for i in range(7):
        bench.submit(make_request(f"r{i}", 3 + 9 * i, 30, seed=i))
    bench.run_until_idle()
    assert bench.ring.num_most_in_flight == 2
    bench.check_all_finished()


def test_each_step_takes_half_of_the_rows() -> None:
    bench = Bench(drafter=always_wrong, cohorts=(2,))
    start(bench, 5)
    begin = len(bench.ring.plans) + 2
    for _ in range(8):
        bench.step()
    halves = [verified(plan) for plan in bench.ring.plans[begin:]]
    assert {len(half) for half in halves} == {2, 3}
    for first, second in pairwise(halves):
        assert first | second == set(range(5))


def test_one_cohort_has_one_step_in_flight() -> None:
    bench = Bench(cohorts=(1,))
    start(bench, 5)
    bench.run_until_idle()
    assert bench.ring.num_most_in_flight == 1
    bench.check_all_finished()


def test_pages_run_out_while_a_step_is_in_flight() -> None:
    # Nobody in flight may lose his pages: the ring checks every table and slot.
    limits = make_limits(num_pages=16, page_size=2, max_context=30, max_rows=6)
    bench = Bench(limits, policy="static:4", cohorts=(2,))
    for i in range(6):
        bench.submit(make_request(f"r{i}", 4, 20, seed=i))
    bench.run_until_idle()
    assert bench.ring.num_most_in_flight == 2
    assert bench.coordinator.snapshot().num_preemptions > 0
    bench.check_all_finished()


def test_who_lacks_a_page_is_not_passed_by_newcomers_for_ever() -> None:
    """They need what others leave, and no more: it has to preempt, so its turn must come while it may."""
    limits = make_limits(num_pages=9, page_size=8, max_context=60, max_rows=4)
    bench = Bench(limits, always_wrong, "off", cohorts=(2,))
    bench.submit(make_request("oldest", 4, 50))
    for i in range(150):
        bench.submit(make_request(f"r{i}", 1, 7, seed=i + 1))
    num_steps, num_chunks, waited = 0, 0, 0
    while not bench.sink.has_ended("oldest"):
        bench.step()
        num_steps += 1
        now = len(bench.sink.chunks.get("oldest", []))
        waited = 0 if now > num_chunks else waited + 1
        num_chunks = now
        assert waited < 10, f"no turn in {waited} steps before step {num_steps}"
    assert bench.coordinator.snapshot().num_preemptions > 0
    bench.run_until_idle()
    bench.check_all_finished()


def test_the_other_step_in_flight_outlives_a_failed_one() -> None:
    bench = Bench(drafter=always_wrong, cohorts=(2,))
    start(bench, 4)
    bench.step()
    failing = bench.ring.plans[-1]
    bench.ring.sabotage = fail
    bench.step()
    other = bench.ring.plans[-1]
    assert verified(failing) and verified(other)
    for seq_id in verified(failing):
        assert bench.sink.last(f"r{seq_id}").error is not None
        del bench.requests[f"r{seq_id}"]
    bench.run_until_idle()
    bench.check_all_finished()


def test_cancelled_in_flight_commits_nothing_and_leaves_no_page() -> None:
    bench = Bench(drafter=always_wrong, cohorts=(2,))
    start(bench, 4)
    bench.step()
    if 0 not in verified(bench.ring.plans[-1]):
        bench.step()
    assert 0 in verified(bench.ring.plans[-1])  # it has been sent and has not landed
    num_tokens = len(bench.sink.tokens("r0"))
    bench.coordinator.cancel("r0")
    # A newcomer gets the pages while the cancelled row is still being verified.
    bench.submit(make_request("new", 30, 20, seed=9))
    bench.run_until_idle()
    assert len(bench.sink.tokens("r0")) == num_tokens
    del bench.requests["r0"]
    bench.check_all_finished()


def test_a_newcomer_joins_the_next_step() -> None:
    bench = Bench(drafter=always_wrong, cohorts=(2,))
    start(bench, 4)
    bench.submit(make_request("new", 4, 5, seed=9))
    begin = len(bench.ring.plans)
    bench.step()
    rows = [row for plan in bench.ring.plans[begin : begin + 1] for row in plan.rows]
    assert any(row.is_prefill for row in rows)
    bench.run_until_idle()
    bench.check_all_finished()


# ----- the choice -------------------------------------------------------------------------------


def run_windows(
    chooser: CohortChooser, num_windows: int, ms: dict[int, float], now: float = 0.0
) -> list[int]:
    """Land steps of ten tokens; a token costs ``ms[number of cohorts]``."""
    chosen: list[int] = []
    for _ in range(num_windows):
        chosen.append(chooser.choose(8))
        for _ in range(WARM_UP_STEPS + WINDOW_STEPS):
            assert chooser.choose(8) == chosen[-1]
            now += 10 * ms[chosen[-1]] / 1e3
            chooser.count(10, now)
    return chosen


@pytest.mark.parametrize(("two", "best"), [(0.8, 2), (1.2, 1), (0.99, 1)])
def test_the_faster_one_runs(two: float, best: int) -> None:
    chosen = run_windows(CohortChooser(BOTH), 10, {1: 1.0, 2: two})
    # The other one is tried again after 4 windows and after 8.
    assert chosen == [1, 2, best, best, 3 - best, best, best, best, 3 - best, best]


def test_the_slower_one_is_tried_again() -> None:
    chooser = CohortChooser(BOTH)
    ms = {1: 1.0, 2: 1.3}
    assert run_windows(chooser, PROBE_EVERY, ms).count(2) == 5  # at first, after 4, 8, 16 and 32
    ms[2] = 0.2  # drafting became cheap: one probe shows it
    chosen = run_windows(chooser, 3 * PROBE_EVERY, ms)
    assert chosen[0] == 2
    assert chosen.count(2) > PROBE_EVERY


def test_a_single_sequence_is_never_split() -> None:
    chooser = CohortChooser(BOTH)
    run_windows(chooser, 3, {1: 1.0, 2: 0.5})
    assert chooser.choose(8) == 2
    assert chooser.choose(1) == 1


def test_loads_are_told_apart() -> None:
    chooser = CohortChooser(BOTH)
    run_windows(chooser, 3, {1: 1.0, 2: 0.5})
    assert chooser.choose(8) == 2
    assert chooser.choose(32) == 1  # not measured yet
    assert chooser.choose(5) == 2


def test_a_full_engine_is_measured_though_sequences_end_and_begin() -> None:
    bench = Bench(make_limits(max_rows=8), always_wrong, "static:4", cohorts=BOTH)
    for i in range(200):
        bench.submit(make_request(f"r{i}", 4, 10 + i % 23, seed=i))
    while bench.coordinator.snapshot().num_waiting:
        bench.step()
    assert {plan.num_cohorts for plan in bench.ring.plans} == {1, 2}


def test_one_lucky_window_is_soon_found_out() -> None:
    chooser = CohortChooser(BOTH)
    run_windows(chooser, 2, {1: 1.0, 2: 0.9})
    assert run_windows(chooser, 14, {1: 1.0, 2: 1.1})[-6:] == [1] * 6


def test_a_pause_is_not_measured() -> None:
    chooser = CohortChooser(BOTH)
    now = 0.0
    for _ in range(3 * WINDOW_STEPS):
        chooser.choose(8)
        chooser.pause()
        now += 1000.0
        chooser.count(10, now)
    chooser.pause()
    chosen = run_windows(chooser, 4, {1: 1.0, 2: 2.0}, now=1e6)
    assert chosen == [1, 2, 1, 1]


def test_a_window_goes_on_when_its_load_comes_back() -> None:
    chooser, now = CohortChooser(BOTH), 0.0
    for step in range(3 * WINDOW_STEPS):
        assert chooser.choose(32 if step // 8 % 2 else 8) in (1, 2)
        now += 0.01
        chooser.count(10, now)
    assert chooser.choose(8) == chooser.choose(32) == 2


@pytest.mark.parametrize("allowed", [(1,), (2,)])
def test_a_fixed_choice_stays(allowed: tuple[int, ...]) -> None:
    assert set(run_windows(CohortChooser(allowed), 4, {1: 1.0, 2: 1.0})) == set(allowed)
