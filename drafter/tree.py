"""Draft trees: the most likely prefixes that the slots of one draft block allow.

A draft pass gives a distribution at every slot, independent of the tokens at the others, so the score of a
prefix is the sum of its tokens' log-probabilities. A tree of n nodes holds the n prefixes with the largest
scores. Of equal ones the shorter comes first, then the one whose parent comes first, then the likelier token:
so a parent is always in front of its children, and the tree of n nodes is the beginning of that of n + 1.

When tokens are sampled, scores are those that sampling itself would choose by: processed logits plus the
noise of the request's seed at the slot's position. The target is chosen with the same noise.

Shape letters: T slots of all rows, R rows, S slots of a row, K candidates of a slot, N nodes of a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_ops.sampling import SamplingRun, coupled_scores, largest_scores

MOST_CANDIDATES = 8
"""Tokens of one slot that may become siblings."""


class DraftTree(NamedTuple):
    """Nodes in the order in which they are worth verifying."""

    token_ids: list[int]
    parents: list[int]
    """0 is the anchor, n the n-th node; every parent comes before its children."""
    scores: list[float]
    """Path log-probabilities under the drafter, descending."""


def grow_trees(
    logits: Tensor,
    runs: Sequence[SamplingRun],
    sizes: Sequence[int],
    num_candidates: int = MOST_CANDIDATES,
) -> list[DraftTree]:
    """Grow one tree per run.

    Args:
        logits: ``[T, V]``, any float dtype; tokens at -inf are never drafted.
        runs: one per row, its slots in order; together they cover the logits.
        sizes: most nodes of each tree; it has fewer where its slots do not allow so many.
        num_candidates: K at most.
    """
    scores, token_ids = slot_candidates(logits, runs, num_candidates)
    if logits.device.type != "cpu":
        return _grow_on_device(scores, token_ids, runs, sizes)
    all_scores, all_ids = scores.tolist(), token_ids.tolist()
    return [
        grow_tree(all_scores[run.start : run.end], all_ids[run.start : run.end], size)
        for run, size in zip(runs, sizes, strict=True)
    ]


def slot_candidates(
    logits: Tensor, runs: Sequence[SamplingRun], num_candidates: int
) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of every slot.

    Returns:
        their log-probabilities ``[T, K]`` float32, descending, -inf where there are no more, and ids
        ``[T, K]`` int64.
    """
    count = min(num_candidates, logits.shape[1])
    coupled = coupled_scores(logits, runs)
    if coupled is None:
        return _likeliest(logits.float(), count)
    noisy_scores, places = _likeliest(coupled.scores, count)
    noisy_ids = coupled.token_ids.gather(1, places)
    if coupled.rows.shape[0] == logits.shape[0]:
        return noisy_scores, noisy_ids
    scores, token_ids = _likeliest(logits.float(), count)
    scores[coupled.rows] = -torch.inf
    scores[coupled.rows, : noisy_scores.shape[1]] = noisy_scores
    token_ids[coupled.rows, : noisy_ids.shape[1]] = noisy_ids
    return scores, token_ids


def _likeliest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    return largest_scores(scores.log_softmax(dim=-1), min(count, scores.shape[1]))


def grow_tree(scores: list[list[float]], token_ids: list[list[int]], size: int) -> DraftTree:
    """Grow one tree, best node first.

    Args:
        scores: ``[S][K]`` log-probabilities, descending, none above 0; -inf is never a node.
        token_ids: ``[S][K]``.
        size: most nodes.
    """
    tree = DraftTree([], [], [])
    num_slots, num_ranks = len(scores), len(scores[0]) if scores else 0
    nothing = -torch.inf
    paths = [0.0]  # of the anchor, then of every node
    # What may come next: (-score, depth, parent, rank), the first child and the next sibling of every node.
    heap: list[tuple[float, int, int, int]] = []
    if size and num_slots and scores[0][0] > nothing:
        heap.append((-scores[0][0], 0, 0, 0))
    while heap:
        negative, depth, parent, rank = heappop(heap)
        tree.token_ids.append(token_ids[depth][rank])
        tree.parents.append(parent)
        tree.scores.append(-negative)
        paths.append(-negative)
        node = len(tree.parents)
        if node == size:
            break
        if rank + 1 < num_ranks and (score := scores[depth][rank + 1]) > nothing:
            heappush(heap, (-(paths[parent] + score), depth, parent, rank + 1))
        if depth + 1 < num_slots and (score := scores[depth + 1][0]) > nothing:
            heappush(heap, (negative - score, depth + 1, node, 0))
    return tree


def _grow_on_device(
    scores: Tensor, token_ids: Tensor, runs: Sequence[SamplingRun], sizes: Sequence[int]
) -> list[DraftTree]:
    num_slots = max(run.end - run.start for run in runs)
    nowhere = scores.shape[0]  # the slot of rows that have no more
    places = [[*range(r.start, r.end)] + [nowhere] * (num_slots - (r.end - r.start)) for r in runs]
    index = torch.tensor(places, device=scores.device)  # [R, S]
    padded = torch.cat([scores, scores.new_full((1, scores.shape[1]), -torch.inf)])
    padded_ids = torch.cat([token_ids, token_ids[:1]])
    packed = grow_together(padded[index], padded_ids[index], max(sizes)).cpu()
    paths = packed[:, 2].view(torch.float64)
    num_nodes = (paths > -torch.inf).sum(dim=1).tolist()
    ids, parents, all_paths = packed[:, 0].tolist(), packed[:, 1].tolist(), paths.tolist()
    trees = []
    for row, size in enumerate(sizes):
        count = min(size, num_nodes[row])
        trees.append(DraftTree(ids[row][:count], parents[row][:count], all_paths[row][:count]))
    return trees


def grow_together(scores: Tensor, token_ids: Tensor, size: int) -> Tensor:
    """Grow the trees of all rows, level by level, with nothing but tensor operators of fixed shapes.

    The best nodes of a level are children of the best of the level before, so each level keeps as many as
    the tree could take of it; the best of all levels are the tree.

    Args:
        scores: ``[R, S, K]`` as in ``grow_tree``.
        token_ids: ``[R, S, K]`` int64.
        size: N, at least 1.

    Returns:
        ``[R, 3, N']`` int64 with N' nodes at most N: token ids, parents, and the bits of float64 scores. What
        has a score of -inf comes last and is no node.
    """
    # Sums as exact as those of ``grow_tree``, so that both break the same ties.
    scores = scores.double()
    num_rows, num_slots, num_ranks = scores.shape
    level = scores.new_zeros(num_rows, 1)  # the anchor
    first = 0
    paths, parents = [level], [token_ids.new_zeros(num_rows, 1)]
    ids = [token_ids.new_zeros(num_rows, 1)]
    for depth in range(min(num_slots, size)):
        children = (level[:, :, None] + scores[:, depth, None, :]).flatten(1)
        ordered, places = children.sort(dim=-1, descending=True, stable=True)
        num_kept = size - depth  # the others are its ancestors
        places = places[:, :num_kept]
        parents.append(first + places // num_ranks)
        ids.append(token_ids[:, depth].gather(1, places % num_ranks))
        first += level.shape[1]
        level = ordered[:, :num_kept]
        paths.append(level)
    all_paths, order = torch.cat(paths, dim=1).sort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order)
    rank.scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
    order = order[:, 1 : size + 1]  # without the anchor, whose score of 0 nothing exceeds
    nodes = torch.cat(parents, dim=1).gather(1, order)
    return torch.stack(
        [
            torch.cat(ids, dim=1).gather(1, order),
            rank.gather(1, nodes),
            all_paths[:, 1 : size + 1].contiguous().view(torch.int64),
        ],
        dim=1,
    )
