"""Trees of the fake engine: how many nodes rows get, and what comes of them."""

from __future__ import annotations

from dflash_wire.records import Row, StepPlan
from dflash_wire.trees import TreeOutcome, packed_scores


def most_drafts(plan: StepPlan) -> list[int]:
    """Drafts of each row at most: those that share nodes get a number that differs from row to row."""
    most, budget = [row.width - 1 for row in plan.rows], plan.node_budget
    if budget is not None:
        left = budget.most_nodes
        for index, row in enumerate(plan.rows):
            if budget.map_of(index) >= 0:
                assert row.is_tree, "a chain shares nodes"
                most[index] = min(most[index], left, (row.start_position * 7) % 20)
                left -= most[index]
    return most


def fake_tree(row: Row, num_accepted_drafts: int, most: int) -> TreeOutcome:
    """A tree that may be smaller than planned, its longest path first; twice as many nodes were made."""
    num_nodes = max(num_accepted_drafts, most - row.start_position % 3, 0)
    scores = packed_scores([-0.2 * node for node in range(2 * num_nodes)])
    return TreeOutcome(num_nodes, list(range(num_accepted_drafts)), scores)
