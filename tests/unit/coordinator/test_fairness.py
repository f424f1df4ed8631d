"""Bounded waits: who is large, unimportant or has been preempted comes to an end as well."""

from __future__ import annotations

from coordinator_fakes import Bench, make_limits, make_request
from toy_target import always_right, always_wrong

from gateway.coordinator.waiting import MAX_OVERTAKES


def first_row_of(bench: Bench, seq_id: int) -> int:
    """The step that had the sequence's first row."""
    return next(
        step
        for step, plan in enumerate(bench.ring.plans)
        if any(row.seq_id == seq_id for row in plan.rows)
    )


def test_a_large_request_is_not_passed_by_small_ones_that_would_fit() -> None:
    # Ten pages of 4: while "old" holds five, the large one has to wait, the small ones behind it would fit.
    limits = make_limits(num_pages=10, max_context=40, max_draft_block_size=4)
    bench = Bench(limits, always_wrong, "static:4")
    bench.submit(make_request("old", 12, 8))
    bench.step()
    bench.submit(make_request("large", 28, 4, seed=1))
    for i in range(2, 12):
        bench.submit(make_request(f"small{i}", 2, 2, seed=i))
    bench.run_until_idle()
    bench.check_all_finished()
    starts = [first_row_of(bench, seq_id) for seq_id in range(12)]
    assert starts == sorted(starts), "in the order of arrival, large or small"


def test_who_is_preempted_for_important_ones_ends_in_bounded_time() -> None:
    """The least important one loses its pages again and again, until it has been overtaken enough."""
    limits = make_limits(num_pages=8, max_context=32, max_draft_block_size=4, max_rows=2)
    bench = Bench(limits, always_wrong, "static:4")
    bench.submit(make_request("patient", 4, 24, priority=9))
    bench.step()
    num_steps, num_submitted = 0, 0
    while not bench.sink.has_ended("patient"):
        if bench.coordinator.snapshot().num_waiting < 2:
            num_submitted += 1
            bench.submit(make_request(f"r{num_submitted}", 14, 10, seed=num_submitted))
        bench.step()
        num_steps += 1
        assert num_submitted <= 2 * MAX_OVERTAKES, "it waits for ever"
    assert bench.coordinator.snapshot().num_preemptions > 1
    bench.run_until_idle()
    bench.check_all_finished()


def test_a_victim_in_the_middle_of_its_prefill_begins_again() -> None:
    # Chunks of at most 8 positions; pages run out while "new" has read a part of its prompt.
    limits = make_limits(num_pages=12, max_context=48, max_step_positions=8, max_draft_block_size=4)
    bench = Bench(limits, always_right, "static:4", caches_prefixes=False)
    bench.submit(make_request("old", 15, 30))
    while not bench.sink.tokens("old"):
        bench.step()
    bench.submit(make_request("new", 24, 6, seed=1))
    bench.run_until_idle()
    bench.check_all_finished()
    begins = [
        row.start_position
        for plan in bench.ring.plans
        for row in plan.rows
        if row.seq_id == 1 and row.is_prefill
    ]
    assert begins.count(0) == 2, "it began, lost its pages, and began again"
    assert begins[begins.index(0, 1) - 1] > 0, "it had read a part of its prompt by then"
    assert begins[begins.index(0, 1) - 1] < 24 - 8


def test_output_does_not_depend_on_who_was_preempted_when() -> None:
    """The same requests in pools of many sizes: different preemptions, the same tokens."""
    seen = set()
    for num_pages in range(12, 80, 6):
        limits = make_limits(num_pages=num_pages, max_context=48, max_draft_block_size=4)
        bench = Bench(limits, policy="static:4")
        for i in range(6):
            bench.submit(make_request(f"r{i}", 5 + i, 30, seed=i, priority=i % 2))
        bench.run_until_idle()
        bench.check_all_finished()
        seen.add(bench.coordinator.snapshot().num_preemptions)
    assert len(seen) > 3 and 0 in seen
