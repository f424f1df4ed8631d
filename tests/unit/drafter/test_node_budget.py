"""The nodes of a step's trees are shared out by what they are worth, over all rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_wire.records import DraftResult
from dflash_wire.trees import LEAST_BIN_SCORE, NUM_SCORE_BINS, NodeBudget, unpacked_scores
from drafter.node_budget import add_trees, shared_out
from drafter.tree import DraftTree

BINS = np.linspace(LEAST_BIN_SCORE, 0.0, NUM_SCORE_BINS)
AS_DRAFTED = np.exp(BINS).tolist()


def tree(*scores: float) -> DraftTree:
    return DraftTree(list(range(10, 10 + len(scores))), [0] * len(scores), list(scores))


def budget(
    num_nodes: list[int], step_ms: list[float], num_rows: int, *maps: list[float]
) -> NodeBudget:
    return NodeBudget([0] * num_rows, num_nodes, step_ms, list(maps) or [AS_DRAFTED])


def test_the_best_nodes_of_all_rows_are_taken() -> None:
    trees = [tree(-0.1, -3.0, -4.0), tree(-0.2, -0.3, -0.4)]
    free = budget([0, 1, 2, 3, 4, 5, 6], [1.0] * 7, 2)
    assert shared_out(trees, [0, 0], free) == [3, 3]
    four = budget([0, 4], [1.0, 1.0], 2)
    assert shared_out(trees, [0, 0], four) == [1, 3]


def test_nodes_that_cost_more_than_they_give_are_left_out() -> None:
    trees = [tree(-0.1, -0.2, -5.0)]
    dear = budget([0, 1, 2, 3], [1.0, 1.1, 1.2, 1.3], 1)
    assert shared_out(trees, [0], dear) == [2]
    hopeless = budget([0, 1, 2, 3], [1.0, 3.0, 4.0, 5.0], 1)
    assert shared_out(trees, [0], hopeless) == [0]


def test_rows_of_other_classes_have_other_maps() -> None:
    trees = [tree(-0.1, -0.2), tree(-0.3, -0.4)]
    doubted = (0.1 * np.exp(BINS)).tolist()
    two = budget([0, 2], [1.0, 1.0], 2, doubted, AS_DRAFTED)
    assert shared_out(trees, [0, 1], two) == [0, 2]
    assert shared_out(trees, [1, 0], two) == [2, 0]


def test_trees_smaller_than_the_budget_and_none_at_all() -> None:
    wide = budget([0, 8, 16], [1.0, 1.0, 1.0], 2)
    assert shared_out([tree(-0.5), tree()], [0, 0], wide) == [1, 0]
    assert shared_out([tree(), tree()], [0, 0], wide) == [0, 0]


@given(
    st.lists(st.lists(st.floats(-9.0, 0.0), max_size=6), min_size=1, max_size=5),
    st.lists(st.floats(0.0, 0.5), min_size=8, max_size=8),
)
def test_no_other_choice_is_worth_more(scores: list[list[float]], more_ms: list[float]) -> None:
    trees = [tree(*sorted(mine, reverse=True)) for mine in scores]
    step_ms = (1.0 + np.cumsum(more_ms)).tolist()
    given_budget = budget(list(range(8)), step_ms, len(trees))
    counts = shared_out(trees, [0] * len(trees), given_budget)
    likely = sorted(
        (float(np.interp(s, BINS, AS_DRAFTED)) for t in trees for s in t.scores), reverse=True
    )
    values = [(len(trees) + sum(likely[:n])) / step_ms[n] for n in range(min(8, len(likely) + 1))]
    taken = [
        np.interp(t.scores[:n], BINS, AS_DRAFTED).sum() for t, n in zip(trees, counts, strict=True)
    ]
    value = (len(trees) + sum(taken)) / step_ms[sum(counts)]
    assert value == pytest.approx(max(values))


def test_rows_that_do_not_share_keep_all_and_scores_of_all_nodes_go_on() -> None:
    result = DraftResult(1, [[], [], []])
    mine = NodeBudget([-1, 0], [0, 1], [1.0, 1.0], [AS_DRAFTED])
    add_trees(result, {0: tree(-1.0, -2.0), 1: tree(-0.5, -0.6), 2: tree(-0.1)}, mine)
    assert [len(ids) for ids in result.draft_token_ids] == [2, 1, 1]
    assert result.parents is not None
    assert [len(parents) for parents in result.parents] == [2, 1, 1]
    assert result.scores is not None
    assert [len(unpacked_scores(packed)) for packed in result.scores] == [2, 2, 1]
