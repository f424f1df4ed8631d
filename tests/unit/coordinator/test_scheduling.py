"""Who gets positions, rows and pages, and in which order."""

from __future__ import annotations

from itertools import pairwise

import pytest
from coordinator_fakes import Bench, make_limits, make_request
from toy_target import DRAFTERS, always_wrong

from dflash_wire.records import StepPlan
from gateway.coordinator.waiting import MAX_OVERTAKES


def prefilled(plan: StepPlan) -> list[int]:
    return [row.seq_id for row in plan.rows if row.is_prefill]


def verified(plan: StepPlan) -> list[int]:
    return [row.seq_id for row in plan.rows if not row.is_prefill]


def test_prefill_takes_what_verify_rows_leave() -> None:
    bench = Bench(make_limits(max_step_positions=20), always_wrong, "static:8")
    bench.submit(make_request("old", 4, 30))
    bench.step()
    bench.submit(make_request("new", 30, 5))
    bench.step()
    first, second = bench.ring.plans[1].rows
    assert (first.is_prefill, first.width) == (False, 8)
    assert (second.is_prefill, second.start_position, second.num_positions) == (True, 0, 12)
    assert not second.samples
    bench.step()
    assert bench.ring.plans[2].rows[1].start_position == 12
    bench.run_until_idle()
    bench.check_all_finished()


def test_admission_in_arrival_order_up_to_max_rows() -> None:
    bench = Bench(make_limits(max_rows=2), policy="off")
    for i in range(5):
        bench.submit(make_request(f"r{i}", 3, 2 + i, seed=i))
    seen: list[int] = []
    while bench.step():
        assert len(bench.ring.plans[-1].rows) <= 2
        seen += prefilled(bench.ring.plans[-1])
    assert seen == [0, 1, 2, 3, 4]
    bench.check_all_finished()


def test_round_robin_when_widths_exceed_the_budget() -> None:
    # Eight rows of width 8 want 64 positions of 20: two rows a step, so nobody waits over 4 steps.
    bench = Bench(make_limits(max_step_positions=20), always_wrong, "static:8")
    for i in range(8):
        bench.submit(make_request(f"r{i}", 4, 30, seed=i))
    while len({s for plan in bench.ring.plans for s in verified(plan)}) < 8:
        bench.step()
    begin = len(bench.ring.plans)
    for _ in range(16):
        bench.step()
    rows_of = [verified(plan) for plan in bench.ring.plans[begin:]]
    for seq_id in range(8):
        turns = [step for step, rows in enumerate(rows_of) if seq_id in rows]
        assert len(turns) >= 4
        assert max(b - a for a, b in pairwise(turns)) <= 4
    bench.run_until_idle()
    bench.check_all_finished()


def test_prefill_is_not_starved_by_verify_rows() -> None:
    # The old sequence's width is the whole budget; the new one must still start at once.
    bench = Bench(make_limits(max_step_positions=16), always_wrong, "static:16")
    bench.submit(make_request("old", 4, 100))
    bench.step()
    bench.submit(make_request("new", 4, 3, seed=1))
    for _ in range(8):
        bench.step()
    assert bench.sink.tokens("new")
    turns = [step for step, plan in enumerate(bench.ring.plans) if 0 in verified(plan)]
    assert max(b - a for a, b in pairwise(turns)) <= 3
    bench.run_until_idle()
    bench.check_all_finished()


def test_ingest_travels_in_the_next_plan_even_without_a_row() -> None:
    # One row fits a step, so the other sequence's features come without its row.
    limits = make_limits(max_step_positions=8, max_draft_block_size=8)
    bench = Bench(limits, always_wrong, "static:8")
    bench.submit(make_request("a", 4, 12))
    bench.submit(make_request("b", 4, 12, seed=1))
    bench.run_until_idle()
    bench.check_all_finished()
    lone = [
        plan
        for plan in bench.ring.plans
        if {i.page_ids[0] for i in plan.ingests} - {row.page_ids[0] for row in plan.rows}
    ]
    assert len(lone) > 10


@pytest.mark.parametrize(("policy", "needs"), [("off", False), ("static:4", True)])
def test_only_sequences_that_may_draft_are_ingested(policy: str, needs: bool) -> None:
    bench = Bench(drafter=always_wrong, policy=policy)
    bench.submit(make_request("r", 5, 4))
    bench.run_until_idle()
    counts = [[i.num_tokens for i in plan.ingests] for plan in bench.ring.plans]
    # The last token is decoded plainly, so nobody has to be fed for it.
    assert counts == ([[], [5], [1], []] if needs else [[], [], [], []])
    assert [plan.needs_drafter for plan in bench.ring.plans] == [False, needs, needs, False]


def test_preemption_takes_the_youngest_and_changes_nothing() -> None:
    # 8 pages of 4: three sequences of up to 24 tokens start, but can not all end together.
    limits = make_limits(num_pages=8, max_context=32, max_draft_block_size=4)
    bench = Bench(limits, always_wrong, "static:4")
    for i in range(3):
        bench.submit(make_request(f"r{i}", 4, 20, seed=i))
    restarted: list[int] = []
    while bench.step():
        plan = bench.ring.plans[-1]
        restarted += [r.seq_id for r in plan.rows if r.is_prefill and len(r.token_ids) > 4]
    assert restarted and 0 not in restarted
    assert bench.coordinator.snapshot().num_preemptions >= len(restarted)
    bench.check_all_finished()


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_one_sequence_may_use_every_slot(drafter: str) -> None:
    limits = make_limits(num_pages=6, max_context=24, max_step_positions=16)
    bench = Bench(limits, DRAFTERS[drafter], "static:16")
    for i in range(4):
        bench.submit(make_request(f"r{i}", 3 + i, 100, seed=i))
    bench.run_until_idle()
    bench.check_all_finished()


def test_pages_follow_the_sequence_not_its_limit() -> None:
    bench = Bench(make_limits(page_size=4), always_wrong, "off")
    bench.submit(make_request("r", 5, 100))
    bench.step()
    snapshot = bench.coordinator.snapshot()
    assert snapshot.num_pages - snapshot.num_free_pages == 2
    for _ in range(8):
        bench.step()
    snapshot = bench.coordinator.snapshot()
    assert snapshot.num_pages - snapshot.num_free_pages == 4


def test_admission_waits_for_room_for_a_first_draft_block() -> None:
    # Two of ten pages are left: enough for the second prompt, not for the block behind it.
    limits = make_limits(num_pages=10, max_context=40, max_draft_block_size=8)
    bench = Bench(limits, always_wrong, "static:8")
    bench.submit(make_request("old", 20, 12))
    bench.step()
    bench.step()
    bench.submit(make_request("new", 8, 10, seed=1))
    while not bench.sink.has_ended("old"):
        bench.step()
        assert 1 not in prefilled(bench.ring.plans[-1])
    bench.run_until_idle()
    assert bench.coordinator.snapshot().num_preemptions == 0
    bench.check_all_finished()


def admissions(bench: Bench) -> list[int]:
    return [seq_id for plan in bench.ring.plans for seq_id in prefilled(plan)]


def test_priority_goes_before_arrival() -> None:
    bench = Bench(make_limits(max_rows=1), policy="off")
    for i, priority in enumerate([0, 5, 0, -3, 5]):
        bench.submit(make_request(f"r{i}", 3, 3, seed=i, priority=priority))
    bench.run_until_idle()
    bench.check_all_finished()
    assert admissions(bench) == [3, 0, 2, 1, 4]


def test_nobody_waits_for_ever() -> None:
    """An endless stream of urgent requests overtakes a patient one a bounded number of times."""
    bench = Bench(make_limits(max_rows=1), policy="off")
    bench.submit(make_request("first", 3, 2))
    bench.submit(make_request("patient", 3, 2, seed=1, priority=9))
    for i in range(3 * MAX_OVERTAKES):
        bench.submit(make_request(f"r{i}", 3, 2, seed=i, priority=-1))
        bench.step()
        bench.step()
    assert bench.sink.has_ended("patient")
    assert admissions(bench).index(1) <= MAX_OVERTAKES + 1
    bench.run_until_idle()
    bench.check_all_finished()


def test_the_last_rank_gives_its_pages_first() -> None:
    limits = make_limits(num_pages=8, max_context=32, max_draft_block_size=4)
    bench = Bench(limits, always_wrong, "static:4")
    for i, priority in enumerate([1, 0, 0]):
        bench.submit(make_request(f"r{i}", 4, 20, seed=i, priority=priority))
    bench.run_until_idle()
    bench.check_all_finished()
    assert bench.coordinator.snapshot().num_preemptions > 0
    ends = {row.seq_id: step for step, plan in enumerate(bench.ring.plans) for row in plan.rows}
    assert ends[0] == max(ends.values()), "the oldest, but least important one, ends last"
