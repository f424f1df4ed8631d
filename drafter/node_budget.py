"""Which nodes of a step's trees are worth verifying, when all of them are known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflash_wire.records import DraftResult
from dflash_wire.trees import LEAST_BIN_SCORE, NUM_SCORE_BINS, NodeBudget, packed_scores
from drafter.tree import DraftTree

_BIN_SCORES = np.linspace(LEAST_BIN_SCORE, 0.0, NUM_SCORE_BINS)


def add_trees(result: DraftResult, trees: dict[int, DraftTree], budget: NodeBudget | None) -> None:
    """Put trees into a step's drafts, as much of them as the step's budget allows. Mutates ``result``.

    Args:
        result: of the step.
        trees: by row.
        budget: None: all of them.
    """
    shares: dict[int, int] = {}
    if budget is not None:
        sharing = {row: index for row in trees if (index := budget.map_of(row)) >= 0}
        shared = [trees[row] for row in sharing]
        counts = shared_out(shared, list(sharing.values()), budget)
        shares = dict(zip(sharing, counts, strict=True))
    for row, tree in trees.items():
        most = shares.get(row, len(tree.token_ids))
        scores = packed_scores(tree.scores)
        result.add_tree(row, tree.token_ids[:most], tree.parents[:most], scores)


def shared_out(trees: Sequence[DraftTree], maps: Sequence[int], budget: NodeBudget) -> list[int]:
    """Return how many nodes of each tree are verified, its best ones.

    Scores fall along a tree and probabilities rise with scores, so the best nodes of all trees are a
    beginning of each.

    Args:
        trees: of the rows that share.
        maps: which of ``budget.acceptance`` is each row's.
        budget: of the step.
    """
    sizes = [len(tree.scores) for tree in trees]
    if not sum(sizes):
        return sizes
    likely = [
        np.interp(tree.scores, _BIN_SCORES, budget.acceptance[index])
        for tree, index in zip(trees, maps, strict=True)
    ]
    falling = -np.concatenate(likely)
    order = falling.argsort(kind="stable")
    expected = np.concatenate([[0.0], -falling[order].cumsum()])
    counts = np.minimum(budget.num_nodes, len(order))
    per_ms = (len(trees) + expected[counts]) / np.array(budget.step_ms)
    taken = order[: counts[int(per_ms.argmax())]]
    owners = np.repeat(np.arange(len(trees)), sizes)
    shares: list[int] = np.bincount(owners[taken], minlength=len(trees)).tolist()
    return shares
