"""Widths that a scheduler chooses change how tokens come, never which; and it learns from all of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from coordinator_fakes import Bench, make_limits, make_request
from toy_target import DRAFTERS

from dflash_wire.drafters import DrafterLimits
from dflash_wire.errors import InvalidRequestError
from dflash_wire.records import StepPlan
from dflash_wire.trees import NUM_SCORE_BINS
from gateway.coordinator.block_scheduler.build import build_scheduler
from gateway.coordinator.block_scheduler.cost_table import CostSample, CostTable
from gateway.coordinator.block_scheduler.records import (
    TREES,
    Decision,
    RowState,
    StepLoad,
    StepOutcome,
    TreeShare,
)
from gateway.coordinator.block_scheduler.scheduler import BlockScheduler

TINY = make_limits(num_pages=13, page_size=4, max_step_positions=24, max_context=52)
GROWING_SHAPES = [(3, 45), (2, 50), (5, 40), (1, 1), (4, 48), (16, 30), (2, 33), (40, 11)]


def priced(draft_ms: float = 1.0, verify_ms: float = 0.01) -> BlockScheduler:
    samples = [
        CostSample(rows, width, 0, draft_ms * (width > 1), 5 + verify_ms * rows * width, 0.0)
        for rows in (1, 8)
        for width in (1, 4, 8, 16)
    ]
    whole = [s._replace(step_ms=s.draft_ms + s.verify_ms) for s in samples]
    return build_scheduler(16, CostTable(whole))


class Hostile(BlockScheduler):
    """Any draft width each step, any verify widths within it."""

    rng = random.Random(5)

    def decide(self, rows: Sequence[RowState], load: StepLoad) -> Decision:
        draft_width = self.rng.randint(1, 16)
        left = load.max_positions - len(rows)
        widths = []
        for row in rows:
            most = min(draft_width, row.max_width, left + 1)
            widths.append(self.rng.randint(1, most))
            left -= widths[-1] - 1
        return Decision(0, draft_width, widths, 1.0, 1.0, "speculate", "any")


def hostile() -> BlockScheduler:
    of = priced()
    return Hostile(of.survival, of.cost, of.table)


class OnlyTrees(BlockScheduler):
    """Shares nodes out whenever it may."""

    def decide(self, rows: Sequence[RowState], load: StepLoad) -> Decision:
        tree = None
        if load.allows_trees:
            most = min(40, load.max_positions - len(rows))
            classes = {row.traffic: [0.5] * NUM_SCORE_BINS for row in rows}
            tree = TreeShare(TREES + 16, 24, [0, most], [1.0, 2.0], classes, 2.0 * len(rows), 2.0)
        widths = [2 if tree else 1] * len(rows)
        return Decision(0, 16 if tree else 1, widths, 1.0, 1.0, "speculate", "trees", tree)


def only_trees() -> BlockScheduler:
    of = priced()
    return OnlyTrees(of.survival, of.cost, of.table)


class Failing(BlockScheduler):
    """Fails in every call."""

    def decide(self, rows: Sequence[RowState], load: StepLoad) -> Decision:
        raise ZeroDivisionError("decide")

    def observe(self, outcome: StepOutcome) -> None:
        raise ZeroDivisionError("observe")

    def forget(self, seq_id: int) -> None:
        raise ZeroDivisionError("forget")


def submit_shapes(bench: Bench, **fields: Any) -> None:
    for i, shape in enumerate(GROWING_SHAPES):
        bench.submit(make_request(f"r{i}", *shape, seed=i, **fields))


@pytest.mark.parametrize("limits", [make_limits(), TINY], ids=["roomy", "tiny"])
@pytest.mark.parametrize("cohorts", [(1,), (2,)])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("make", [hostile, priced, only_trees])
def test_output_equals_plain_generation(
    make: Any, drafter: str, cohorts: tuple[int, ...], limits: Any
) -> None:
    bench = Bench(limits, DRAFTERS[drafter], "adaptive", cohorts=cohorts, scheduler=make())
    submit_shapes(bench)
    bench.run_until_idle()
    bench.check_all_finished()


def test_an_error_in_choosing_widths_costs_nobody_his_answer() -> None:
    of = priced()
    bench = Bench(policy="adaptive", scheduler=Failing(of.survival, of.cost, of.table))
    submit_shapes(bench)
    bench.run_until_idle()
    bench.check_all_finished()
    assert {row.width for plan in bench.ring.plans for row in plan.rows} == {1}


@pytest.mark.parametrize("policy", ["adaptive", "static:8"])
def test_nothing_stays_of_requests_that_have_ended(policy: str) -> None:
    scheduler = priced()
    bench = Bench(policy=policy, scheduler=scheduler)
    for i in range(40):
        bench.submit(make_request(f"r{i}", 3, 5 + i % 7, seed=i))
    bench.run_until_idle()
    assert scheduler.survival.num_requests == 0
    assert scheduler.survival.brier_score >= 0, "it has learned from them"


def test_policies_of_all_kinds_share_a_step() -> None:
    bench = Bench(policy="adaptive", scheduler=priced())
    for i, policy in enumerate(["adaptive", "off", "static:3", "table", None]):
        bench.submit(make_request(f"r{i}", 5, 60, seed=i, policy=policy))
    bench.run_until_idle()
    bench.check_all_finished()
    together = [plan for plan in bench.ring.plans if len(plan.rows) == 5]
    widths = [[row.width for row in plan.rows if not row.is_prefill] for plan in together]
    assert any(1 in mine and 3 in mine and 8 in mine for mine in widths)


def test_good_drafts_widen_and_bad_ones_do_not() -> None:
    def last_width(drafter: str) -> int:
        now_s = 0.0

        def take_as_long_as_priced(plan: StepPlan) -> None:
            nonlocal now_s
            drafts = any(row.width > 1 for row in plan.rows)
            now_s += 1e-3 * (5 + 3.0 * drafts + 0.5 * plan.num_positions)

        bench = Bench(
            make_limits(num_pages=512, max_context=1024),
            DRAFTERS[drafter],
            "adaptive",
            scheduler=priced(draft_ms=3.0, verify_ms=0.5),
            clock=lambda: now_s,
        )
        bench.ring.on_run = take_as_long_as_priced
        bench.submit(make_request("r", 5, 900))
        bench.run_until_idle()
        bench.check_all_finished()
        return max(row.width for plan in bench.ring.plans[-40:-4] for row in plan.rows)

    assert last_width("always_right") >= 16
    assert last_width("always_wrong") <= 4  # probes


def test_trees_share_nodes_where_all_rows_want_them_and_have_room() -> None:
    bench = Bench(policy="adaptive", scheduler=only_trees())
    submit_shapes(bench)
    for i in range(20):
        bench.step()
        bench.submit(make_request(f"late{i}", 5, 30, seed=i))
    bench.run_until_idle()
    bench.check_all_finished()
    shared = [plan for plan in bench.ring.plans if plan.node_budget is not None]
    assert shared
    assert any(row.is_prefill for plan in shared for row in plan.rows)
    assert all(plan.num_features <= bench.limits.max_step_positions for plan in shared)
    bench = Bench(policy="adaptive", scheduler=only_trees())
    bench.submit(make_request("a", 5, 60, policy="adaptive-chain"))
    bench.submit(make_request("b", 5, 60, seed=1))
    bench.run_until_idle()
    bench.check_all_finished()
    together = [plan for plan in bench.ring.plans if len(plan.rows) == 2]
    assert together
    assert all(plan.node_budget is None for plan in together), "one of them asked for chains"


def test_what_trees_gave_is_learned() -> None:
    scheduler = only_trees()
    bench = Bench(drafter=DRAFTERS["always_right"], policy="adaptive", scheduler=scheduler)
    for i in range(8):
        bench.submit(make_request(f"r{i}", 5, 80, seed=i))
    bench.run_until_idle()
    bench.coordinator.learning.start()
    assert scheduler.trees.num_requests == 0, "all have ended"
    assert float(scheduler.trees.acceptance("0:greedy", 16)[-1]) > 0.9
    assert sum(scheduler.gauges().rows_by_width[2:]) > 20


def test_a_block_is_drafted_whole_and_verified_in_part() -> None:
    bench = Bench(policy="adaptive", scheduler=hostile())
    bench.submit(make_request("r", 5, 100))
    bench.run_until_idle()
    rows = [row for plan in bench.ring.plans for row in plan.rows if not row.is_prefill]
    assert any(row.drafted_width > row.width > 1 for row in rows)
    assert all(row.drafted_width <= 16 for row in rows)
    assert all(row.drafted_width == 1 for row in rows if row.width == 1)


class Listening(BlockScheduler):
    """Keeps what it is told."""

    def __init__(self, of: BlockScheduler) -> None:
        super().__init__(of.survival, of.cost, of.table)
        self.outcomes: list[StepOutcome] = []
        self.forgotten: list[int] = []

    def observe(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)
        super().observe(outcome)

    def forget(self, seq_id: int) -> None:
        self.forgotten.append(seq_id)
        super().forget(seq_id)


def test_only_fair_trials_count() -> None:
    """The stop token ends the sequence inside a block: what lies behind it was not rejected."""
    listening = Listening(priced())
    bench = Bench(drafter=DRAFTERS["always_right"], policy="static:8", scheduler=listening)
    bench.submit(make_request("r", 5, 11))
    bench.run_until_idle()
    rows = [row for outcome in listening.outcomes for row in outcome.rows]
    # The prefill gives one token, a block of 8 gives 8, and of the last one 2 are left: width 3.
    assert [(row.num_trials, row.num_accepted) for row in rows] == [(7, 7), (2, 2)]
    assert listening.forgotten == [0]


def test_a_rejected_draft_is_one_failure_and_nothing_behind_it() -> None:
    listening = Listening(priced())
    bench = Bench(drafter=DRAFTERS["always_wrong"], policy="static:8", scheduler=listening)
    bench.submit(make_request("r", 5, 20))
    bench.run_until_idle()
    rows = [row for outcome in listening.outcomes for row in outcome.rows if row.draft_width > 2]
    assert {(row.num_trials, row.num_accepted) for row in rows} == {(1, 0)}


@pytest.mark.parametrize("others", [None, "static:4"])
def test_nothing_is_learned_of_chains_from_trees(others: str | None) -> None:
    """Neither survival nor step times, not even those of chains in the same step."""
    listening = Listening(priced())
    ticks = iter(range(100_000))
    bench = Bench(
        policy=others or "adaptive", scheduler=listening, clock=lambda: 0.001 * next(ticks)
    )
    bench.submit(make_request("chain", 5, 60))
    bench.submit(make_request("tree", 5, 60, seed=1, policy="static-tree:16"))
    for _ in range(200):
        if not bench.step():
            break
        bench.coordinator.learning.start()
        if not listening.outcomes:
            continue
        rows, outcome = bench.ring.plans[-1].rows, listening.outcomes[-1]
        assert [row.seq_id for row in outcome.rows] == [
            row.seq_id for row in rows if not row.is_prefill and not row.is_tree
        ]
        if any(row.is_tree for row in rows):
            assert outcome.step_ms is None
    bench.check_all_finished()
    assert any(len(outcome.rows) < outcome.num_rows for outcome in listening.outcomes)


def test_the_scheduler_knows_of_trees_beside_its_rows() -> None:
    class Loads(Listening):
        def decide(self, rows: Sequence[RowState], load: StepLoad) -> Decision:
            loads.append(load)
            return super().decide(rows, load)

    loads: list[StepLoad] = []
    bench = Bench(policy="adaptive", scheduler=Loads(priced()), cohorts=(1,))
    bench.submit(make_request("open", 5, 60))
    bench.submit(make_request("tree", 5, 200, seed=1, policy="static-tree:40"))
    bench.run_until_idle()
    fixed = {
        (load.num_fixed_rows, load.num_fixed_positions, load.fixed_draft_width) for load in loads
    }
    assert (1, 40, 16) in fixed


def test_time_is_learned_from_one_landing_to_the_next_and_not_across_pauses() -> None:
    listening = Listening(priced())
    ticks = iter(range(100_000))
    bench = Bench(policy="static:4", scheduler=listening, clock=lambda: 0.001 * next(ticks))
    for i in range(2):
        bench.submit(make_request(f"r{i}", 5, 20, seed=i))
        bench.run_until_idle()
    times = [outcome.step_ms for outcome in listening.outcomes]
    assert times[0] is None
    assert times.count(None) >= 2
    assert all(time is None or time > 0 for time in times)


def test_the_first_chunk_says_which_policy_applies() -> None:
    bench = Bench(policy="adaptive", scheduler=priced())
    names = {"default": None, "own": "static:3", "plain": "off"}
    for name, policy in names.items():
        bench.submit(make_request(name, 5, 30, policy=policy))
    bench.run_until_idle()
    bench.coordinator.set_policy("table")
    bench.submit(make_request("after", 5, 30))
    bench.run_until_idle()
    told = {name: [c.policy for c in chunks] for name, chunks in bench.sink.chunks.items()}
    assert {name: policies[0] for name, policies in told.items()} == {
        "default": "adaptive",
        "own": "static:3",
        "plain": "off",
        "after": "table",
    }
    assert all(policy is None for policies in told.values() for policy in policies[1:])


def test_a_new_default_holds_for_running_requests_that_named_none() -> None:
    bench = Bench(
        make_limits(num_pages=512, max_context=1024),
        DRAFTERS["always_right"],
        "static:8",
        cohorts=(1,),
    )
    for name, policy in {"open": None, "fixed": "static:4", "plain": "off"}.items():
        bench.submit(make_request(name, 5, 300, policy=policy))

    def widths() -> dict[int, int]:
        bench.step()
        return {row.seq_id: row.width for row in bench.ring.plans[-1].rows if not row.is_prefill}

    while len(widths()) < 3:
        pass
    assert widths() == {0: 8, 1: 4, 2: 1}
    for policy, width in (("off", 1), ("static:16", 16), ("off", 1), ("static:2", 2)):
        bench.coordinator.set_policy(policy)
        assert widths() == {0: width, 1: 4, 2: 1}
    with pytest.raises(InvalidRequestError):
        bench.coordinator.set_policy("static:17")
    assert widths() == {0: 2, 1: 4, 2: 1}
    bench.run_until_idle()
    bench.check_all_finished()


def test_no_row_gets_a_block_that_its_drafter_does_not_have() -> None:
    drafters = (DrafterLimits("wide", 16), DrafterLimits("narrow", 8))
    limits = make_limits(drafters, max_step_positions=64, num_pages=512)
    for make in (only_trees, hostile):
        right = DRAFTERS["always_right"]
        bench = Bench(limits, (right, right), "adaptive", scheduler=make())
        for i in range(8):
            bench.submit(make_request(f"r{i}", 5, 60, seed=i, drafter="narrow"))
        bench.run_until_idle()
        bench.check_all_finished()
        rows = [row for plan in bench.ring.plans for row in plan.rows if not row.is_prefill]
        assert max(row.drafted_width for row in rows) == 8


def test_a_wide_tree_goes_on_when_the_prefill_that_waited_is_cancelled() -> None:
    """A share of the next step was kept for that prefill; what is left is too little for the tree."""
    limits = make_limits(max_step_positions=64, num_pages=512)
    bench = Bench(limits, policy="static-tree:64", cohorts=(1,))
    bench.submit(make_request("a", 5, 120))
    for _ in range(4):
        bench.step()
    bench.submit(make_request("b", 5, 120, seed=2))
    bench.step()
    bench.coordinator.cancel("b")
    bench.run_until_idle()
    bench.check_finished("a")
    assert bench.coordinator.snapshot().totals.last_error is None
