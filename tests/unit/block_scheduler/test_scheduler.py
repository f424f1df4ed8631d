"""The scheduler as a whole: bounds that hold whatever happens, and its states."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_wire.trees import packed_scores
from gateway.coordinator.block_scheduler.cost import StepCostModel
from gateway.coordinator.block_scheduler.cost_table import CostSample, CostTable
from gateway.coordinator.block_scheduler.records import (
    TREES,
    Decision,
    RowOutcome,
    RowState,
    StepLoad,
    StepOutcome,
    TreeRowOutcome,
)
from gateway.coordinator.block_scheduler.scheduler import (
    PLAIN,
    PROBE,
    SAFE,
    SPECULATE,
    TABLE,
    BlockScheduler,
    SchedulerSettings,
)
from gateway.coordinator.block_scheduler.survival import SurvivalEstimator
from gateway.coordinator.block_scheduler.table_policy import WidthTable
from gateway.coordinator.block_scheduler.weighing import Weighing


def cost_model(per_position: float, captured_sizes: tuple[int, ...] = ()) -> StepCostModel:
    samples = []
    for rows, width in product((1, 8, 64), (1, 4, 8, 16)):
        verify_ms = 4 + per_position * rows * width
        draft_ms = 0.5 * (width > 1)
        samples.append(CostSample(rows, width, 0, draft_ms, verify_ms, verify_ms + draft_ms + 0.5))
    return StepCostModel(CostTable(samples, captured_sizes))


def scheduler(
    per_position: float = 0.05,
    captured_sizes: tuple[int, ...] = (),
    settings: SchedulerSettings | None = None,
) -> BlockScheduler:
    cost = cost_model(per_position, captured_sizes)
    return BlockScheduler(SurvivalEstimator(16), cost, WidthTable(), settings)


def rows(count: int, max_width: int = 16, first: int = 0) -> list[RowState]:
    return [RowState(first + i, "", max_width, 100) for i in range(count)]


def land(
    of: BlockScheduler,
    decision: Decision,
    asked: list[RowState],
    accepts: float,
    slower: float = 1.0,
) -> None:
    """Every row accepts the share ``accepts`` of what it drafted, and then one is rejected."""
    outcomes = []
    for row, width in zip(asked, decision.widths, strict=True):
        accepted = int(accepts * (width - 1))
        trials = min(width - 1, accepted + 1)
        outcomes.append(RowOutcome(row.seq_id, row.traffic, decision.draft_width, trials, accepted))
    positions = sum(decision.widths)
    of.observe(
        StepOutcome(
            decision,
            outcomes,
            len(asked),
            positions,
            0,
            100 * len(asked),
            1,
            decision.draft_width,
            0.5,
            5.0,
            slower * (decision.predicted_ms or 5.0),
        )
    )


def run(
    of: BlockScheduler, num_steps: int, count: int, accepts: float, slower: float = 1.0
) -> list[Decision]:
    decisions = []
    for _ in range(num_steps):
        asked = rows(count)
        decisions.append(of.decide(asked, StepLoad()))
        land(of, decisions[-1], asked, accepts, slower)
    return decisions


def test_good_drafts_are_verified_wide_and_bad_ones_not_at_all() -> None:
    good = run(scheduler(), 100, 2, accepts=1.0)
    assert {d.state for d in good[50:]} <= {SPECULATE, PROBE}
    assert good[-1].draft_width == 16
    bad = run(scheduler(per_position=0.5), 200, 16, accepts=0.0)
    assert sum(d.state == PLAIN for d in bad[-40:]) >= 35
    assert sum(d.state == PROBE for d in bad) >= 2


def test_probes_find_the_way_back() -> None:
    of = scheduler(per_position=0.2)
    assert sum(d.state == PLAIN for d in run(of, 150, 8, accepts=0.0)[-40:]) >= 35
    assert sum(d.state == SPECULATE for d in run(of, 600, 8, accepts=1.0)[-40:]) >= 35


def test_without_prices_the_table_decides() -> None:
    of = BlockScheduler(SurvivalEstimator(16), None, WidthTable())
    decision = of.decide(rows(3), StepLoad())
    assert (decision.state, decision.widths) == (TABLE, [16] * 3)
    assert of.decide(rows(60), StepLoad()).widths == [1] * 60


def test_prices_that_turn_out_wrong_for_long_give_the_table_the_say() -> None:
    of = scheduler()
    states = set()
    for step in range(1200):
        # A machine whose speed swings faster than corrections can follow.
        slower = 4.0 if step // 8 % 2 else 0.25
        (decision,) = run(of, 1, 2, accepts=1.0, slower=slower)
        states.add(decision.state)
    assert SAFE in states


def test_the_log_says_why() -> None:
    of = scheduler()
    run(of, 20, 2, accepts=1.0)
    assert "2 rows: draft width" in of.log[-1].reason
    assert [d.decision_id for d in of.log] == sorted(d.decision_id for d in of.log)


def test_a_row_that_may_not_draft_gets_one_position() -> None:
    of = scheduler()
    run(of, 50, 2, accepts=1.0)
    decision = of.decide([*rows(1), RowState(9, "", 1, 50)], StepLoad())
    assert decision.widths[0] > 1
    assert decision.widths[1] == 1


def test_a_target_for_time_per_token_narrows_what_would_pay() -> None:
    """Throughput wants wide steps of many rows; each row's own time per token wants a short step."""
    free = run(scheduler(0.05), 80, 32, accepts=0.4)[-1]
    bound = scheduler(0.05, settings=SchedulerSettings(target_tpot_ms=5.0))
    held = run(bound, 80, 32, accepts=0.4)[-1]
    assert held.predicted_ms / (held.predicted_tokens / 32) <= free.predicted_ms / (
        free.predicted_tokens / 32
    )


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_whatever_happens_bounds_hold(data: st.DataObject) -> None:
    captured = data.draw(st.sampled_from([(), (1, 2, 4, 8, 16, 32, 64, 128)]))
    of = scheduler(data.draw(st.floats(0.001, 2.0)), captured)
    next_id = last = 0
    for _ in range(data.draw(st.integers(1, 60))):
        count = data.draw(st.integers(1, 12))
        asked = [
            RowState(
                next_id + i, data.draw(st.sampled_from("ab")), data.draw(st.integers(1, 16)), 50
            )
            for i in range(count)
        ]
        next_id += data.draw(st.integers(0, 3))
        most = data.draw(st.integers(count, 200))
        decision = of.decide(asked, StepLoad(max_positions=most))
        assert decision.decision_id > last
        last = decision.decision_id
        assert len(decision.widths) == count
        assert all(
            1 <= w <= min(r.max_width, decision.draft_width)
            for w, r in zip(decision.widths, asked, strict=True)
        )
        assert sum(decision.widths) <= most
        assert np.isfinite(decision.predicted_ms) and decision.predicted_tokens >= count
        land(of, decision, asked, data.draw(st.floats(0, 1)), data.draw(st.floats(0.3, 3)))


@pytest.mark.parametrize("count", [5, 32])
def test_widths_of_a_step_differ_with_what_is_known_of_its_rows(count: int) -> None:
    of = scheduler(per_position=0.3)
    asked = rows(count)
    for _ in range(60):
        decision = of.decide(asked, StepLoad())
        outcomes = []
        for row, width in zip(asked, decision.widths, strict=True):
            accepted = width - 1 if row.seq_id == 0 else 0
            outcomes.append(
                RowOutcome(
                    row.seq_id, "", decision.draft_width, min(width - 1, accepted + 1), accepted
                )
            )
        of.observe(
            StepOutcome(
                decision,
                outcomes,
                count,
                sum(decision.widths),
                0,
                0,
                1,
                decision.draft_width,
                0,
                0,
                None,
            )
        )
    decision = of.decide(asked, StepLoad())
    assert decision.widths[0] >= max(decision.widths[1:])


def test_a_choice_is_prepared_once_and_given_to_the_same_rows_alone() -> None:
    of = scheduler()
    run(of, 40, 12, accepts=0.8)
    decision = of.decide(rows(12), StepLoad())
    land(of, decision, rows(12), 0.8)
    of.prepare()
    num_weighed = 0
    weigh = of._weigh

    def counted(asked: Sequence[RowState], load: StepLoad) -> Weighing:
        nonlocal num_weighed
        num_weighed += 1
        return weigh(asked, load)

    of._weigh = counted  # type: ignore[method-assign]
    prepared = of.decide(rows(12), StepLoad())
    assert num_weighed == 0
    assert prepared.decision_id == decision.decision_id + 1
    assert len(prepared.widths) == 12
    land(of, prepared, rows(12), 0.8)
    of.prepare()
    of.prepare()
    assert num_weighed == 1, "nobody has asked since"
    assert len(of.decide(rows(13), StepLoad()).widths) == 13
    assert max(of.decide([*rows(12), RowState(99, "", 1, 100)], StepLoad()).widths[12:]) == 1
    assert num_weighed == 3


def test_a_prepared_probe_is_one_step_long() -> None:
    of = scheduler(per_position=0.05)
    states = []
    for _ in range(400):
        asked = rows(12)
        states.append((decision := of.decide(asked, StepLoad())).state)
        land(of, decision, asked, 1.0)
        of.prepare()
    probes = [a for a, b in pairwise(states) if a == PROBE]
    assert probes
    assert (PROBE, PROBE) not in set(pairwise(states))


WITH_TREES = SchedulerSettings(allows_trees=True)


def land_trees(
    of: BlockScheduler, decision: Decision, asked: list[RowState], num_hits: int
) -> None:
    """Every row has the nodes that were planned; the first few are accepted and are the chain."""
    assert decision.tree is not None
    trees = []
    for row, width in zip(asked, decision.widths, strict=True):
        hits = min(num_hits, width - 1)
        scores = packed_scores([-0.1 * (i + 1) for i in range(width + 3)])
        trees.append(
            TreeRowOutcome(
                row.seq_id,
                row.traffic,
                decision.draft_width,
                width - 1,
                list(range(hits)),
                scores,
                hits + 1,
                False,
                min(hits + 1, width - 1),
                hits,
            )
        )
    of.observe(
        StepOutcome(
            decision,
            [],
            len(asked),
            sum(decision.widths),
            0,
            100 * len(asked),
            1,
            decision.tree.draft_width,
            0.5,
            5.0,
            decision.predicted_ms,
            trees,
        )
    )


def run_with_trees(
    of: BlockScheduler, num_steps: int, count: int, num_hits: int, load: StepLoad
) -> list[Decision]:
    decisions = []
    for _ in range(num_steps):
        asked = rows(count)
        decisions.append(decision := of.decide(asked, load))
        if decision.tree is None:
            land(of, decision, asked, 0.3)
        else:
            land_trees(of, decision, asked, num_hits)
        of.prepare()
    return decisions


def test_trees_are_drafted_where_they_give_more_than_chains() -> None:
    good = run_with_trees(
        scheduler(0.02, settings=WITH_TREES), 300, 4, 6, StepLoad(allows_trees=True)
    )
    assert sum(d.tree is not None for d in good[-50:]) >= 40
    tree = next(d.tree for d in reversed(good) if d.tree is not None)
    assert tree.num_nodes[0] == 0
    assert tree.draft_width in (TREES + 8, TREES + 16)
    assert list(tree.acceptance) == [""]
    bad = run_with_trees(
        scheduler(0.02, settings=WITH_TREES), 300, 4, 0, StepLoad(allows_trees=True)
    )
    assert sum(d.tree is not None for d in bad[-50:]) <= 10


@pytest.mark.parametrize(
    ("settings", "load"),
    [
        (SchedulerSettings(), StepLoad(allows_trees=True)),
        (WITH_TREES, StepLoad()),
        (SchedulerSettings(allows_trees=True, target_tpot_ms=9.0), StepLoad(allows_trees=True)),
    ],
)
def test_no_trees_where_they_may_not_be(settings: SchedulerSettings, load: StepLoad) -> None:
    decisions = run_with_trees(scheduler(0.02, settings=settings), 60, 4, 6, load)
    assert all(d.tree is None for d in decisions)


def test_a_step_that_may_have_no_trees_has_chains_at_once() -> None:
    of = scheduler(0.02, settings=WITH_TREES)
    before = run_with_trees(of, 100, 4, 6, StepLoad(allows_trees=True))
    assert before[-1].tree is not None
    for decision in run_with_trees(of, 5, 4, 6, StepLoad()):
        assert decision.tree is None
        assert max(decision.widths) <= 16


@pytest.mark.parametrize("most", [4, 5, 9, 40])
def test_shared_nodes_fit_into_the_step(most: int) -> None:
    of = scheduler(0.01, settings=WITH_TREES)
    load = StepLoad(max_positions=most, allows_trees=True)
    for decision in run_with_trees(of, 60, 4, 6, load):
        assert sum(decision.widths) <= most
        if decision.tree is not None:
            assert decision.tree.num_nodes[-1] <= most - 4
            assert decision.tree.num_nodes == sorted(set(decision.tree.num_nodes))


def test_probes_that_were_prepared_in_vain_cost_nothing() -> None:
    """Rows that change every step: what was chosen ahead is never given, and probes are made all the same."""
    of, states = scheduler(per_position=0.2), []
    for step in range(1200):
        asked = rows(6, first=100 * step)
        states.append((decision := of.decide(asked, StepLoad())).state)
        land(of, decision, asked, 0.0 if step < 600 else 1.0)
        of.prepare()
    assert states[300:600].count(PROBE) >= 3
    assert states[-100:].count(SPECULATE) >= 80, "and speculation has come back"


def test_nothing_is_prepared_for_one_of_two_steps_in_flight() -> None:
    of = scheduler()
    of.decide(rows(4), StepLoad(num_cohorts=2))
    of.prepare()
    assert of._choice is None or of._choice.until - of._num_decisions < 4


def test_a_prepared_tree_may_be_wider_than_its_block() -> None:
    of = scheduler(0.001, settings=WITH_TREES)
    load = StepLoad(allows_trees=True)
    run_with_trees(of, 200, 1, 12, load)
    of.decide(rows(1), load)
    of.prepare()
    choice = of._choice
    assert choice is not None and choice.tree is not None
    assert max(choice.widths) > 16
    assert choice.fits(choice.asked, choice.until)
