"""Draft trees against brute force, on the CPU's heap and on the device's levels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_ops.sampling import SamplingRun, choose_tokens, coupled_scores
from dflash_wire.sampling import SamplingParams
from drafter.tree import (
    DraftTree,
    _grow_on_device,
    grow_together,
    grow_tree,
    grow_trees,
    slot_candidates,
)

pytestmark = pytest.mark.unit

GREEDY = SamplingParams()
SAMPLINGS = (
    GREEDY,
    SamplingParams(1.0, seed=5),
    SamplingParams(0.7, 0.9, 0, 9),
    SamplingParams(1.3, 1.0, 3, 2),
    SamplingParams(1.0, 0.8, 6, 2**62),
)

# Few values, so that sums tie; halves and quarters add up without rounding.
levels = st.sampled_from([0.0, -0.25, -0.5, -1.0, -1.5, -2.0, -math.inf])


@st.composite
def slots(draw: st.DrawFn) -> list[list[float]]:
    num_slots, num_ranks = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    any_level = levels | st.floats(-9, 0, width=32)
    row = st.lists(any_level, min_size=num_ranks, max_size=num_ranks)
    lists = draw(st.lists(row, min_size=num_slots, max_size=num_slots))
    return [sorted(scores, reverse=True) for scores in lists]


def ids_of(scores: list[list[float]]) -> list[list[int]]:
    return [[100 * depth + rank for rank in range(len(row))] for depth, row in enumerate(scores)]


def brute_force(scores: list[list[float]], size: int) -> list[tuple[int, ...]]:
    """All prefixes of ranks, best first: score, then length, then the order of parents, then rank."""
    ranks = [range(len(row)) for row in scores]
    prefixes = [
        prefix
        for length in range(1, len(scores) + 1)
        for prefix in itertools.product(*ranks[:length])
    ]
    values = {}
    for prefix in prefixes:
        total = 0.0
        for depth, rank in enumerate(prefix):
            total += scores[depth][rank]
        values[prefix] = total
    order: dict[tuple[int, ...], tuple[Any, ...]] = {(): ()}
    for prefix in prefixes:  # parents come first
        order[prefix] = (-values[prefix], len(prefix), order[prefix[:-1]], prefix[-1])
    possible = [prefix for prefix in prefixes if values[prefix] > -math.inf]
    return sorted(possible, key=lambda prefix: order[prefix])[:size]


def as_prefixes(tree: DraftTree) -> list[tuple[int, ...]]:
    """Each node's path of ranks, by its token ids from ``ids_of``."""
    paths: list[tuple[int, ...]] = [()]
    for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
        depth, rank = divmod(token_id, 100)
        assert len(paths[parent]) == depth
        paths.append((*paths[parent], rank))
    return paths[1:]


def on_device(scores: Sequence[list[list[float]]], sizes: Sequence[int]) -> list[DraftTree]:
    """The device's implementation for several rows; all have the same number of candidates."""
    runs, start = [], 0
    for row in scores:
        runs.append(SamplingRun(start, start + len(row), 0, GREEDY))
        start += len(row)
    values = torch.tensor([slot for row in scores for slot in row], dtype=torch.float32)
    ids = torch.tensor([slot for row in scores for slot in ids_of(row)])
    return _grow_on_device(values, ids, runs, sizes)


@settings(max_examples=300, deadline=None)
@given(slots(), st.integers(1, 24))
def test_both_grow_what_brute_force_finds(scores: list[list[float]], size: int) -> None:
    tree = grow_tree(scores, ids_of(scores), size)
    assert as_prefixes(tree) == brute_force(scores, size)
    assert tree.scores == sorted(tree.scores, reverse=True)
    assert on_device([scores], [size]) == [tree]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 20)), min_size=1, max_size=4), st.data()
)
def test_rows_of_all_sizes_grow_together_as_alone(
    shapes: list[tuple[int, int]], data: st.DataObject
) -> None:
    num_ranks = data.draw(st.integers(1, 5))
    row = st.lists(levels, min_size=num_ranks, max_size=num_ranks)
    scores = [
        [sorted(data.draw(row), reverse=True) for _ in range(num_slots)] for num_slots, _ in shapes
    ]
    sizes = [size for _, size in shapes]
    alone = [grow_tree(s, ids_of(s), size) for s, size in zip(scores, sizes, strict=True)]
    assert on_device(scores, sizes) == alone


@settings(max_examples=60, deadline=None)
@given(slots())
def test_each_tree_is_the_beginning_of_the_next(scores: list[list[float]]) -> None:
    ids = ids_of(scores)
    largest = grow_tree(scores, ids, 40)
    for size in range(1, 41):
        tree = grow_tree(scores, ids, size)
        assert len(tree.parents) == min(size, len(largest.parents))
        for part, whole in zip(tree, largest, strict=True):
            assert part == whole[: len(part)]
        assert all(parent <= node for node, parent in enumerate(tree.parents))


def test_equal_scores_go_by_depth_then_parent_then_rank() -> None:
    scores = [[-1.0, -1.0], [0.0, -1.0], [0.0, -math.inf]]
    tree = grow_tree(scores, [[10, 11], [20, 21], [30, 31]], 8)
    # All of score -1: both tokens of the first slot, their likeliest children, and theirs.
    assert tree.token_ids == [10, 11, 20, 20, 30, 30, 21, 21]
    assert tree.parents == [0, 0, 1, 2, 3, 4, 1, 2]
    assert tree.scores == [-1.0] * 6 + [-2.0] * 2


def random_logits(num_slots: int, vocab_size: int = 24, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_slots, vocab_size, generator=generator) * 2
    logits[:, 7] = -torch.inf  # as the drafter does with its mask token
    return logits


def siblings(tree: DraftTree) -> Iterator[tuple[int, int]]:
    return zip(tree.parents, tree.token_ids, strict=True)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_the_best_path_is_what_a_chain_would_draft(sampling: SamplingParams) -> None:
    logits = random_logits(4)
    run = SamplingRun(0, 4, 41, sampling)
    chain = choose_tokens(logits, [run]).tolist()
    (tree,) = grow_trees(logits, [run], [400])
    node, path = 0, []
    for _ in range(4):
        child = tree.parents.index(node)  # the first one is the best
        path.append(tree.token_ids[child])
        node = child + 1
    assert path == chain
    assert 7 not in tree.token_ids
    assert len(set(siblings(tree))) == len(tree.parents), "two siblings are the same token"


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_scores_are_those_that_tokens_are_chosen_by(sampling: SamplingParams) -> None:
    logits = random_logits(3)
    run = SamplingRun(0, 3, 41, sampling)
    (tree,) = grow_trees(logits, [run], [12])
    coupled = coupled_scores(logits, [run])
    scores = torch.full_like(logits, -torch.inf)
    if coupled is None:
        scores = logits.log_softmax(-1)
    else:
        scores.scatter_(1, coupled.token_ids, coupled.scores.log_softmax(-1))
    depths, paths = [-1], [0.0]
    for parent, token_id in siblings(tree):
        depths.append(depths[parent] + 1)
        paths.append(paths[parent] + float(scores[depths[-1], token_id]))
    assert tree.scores == pytest.approx(paths[1:], abs=1e-5)
    if sampling.top_k:  # no more than these may ever be chosen
        assert max(tree.parents.count(node) for node in set(tree.parents)) <= sampling.top_k


def test_a_row_has_the_same_tree_whoever_shares_the_pass() -> None:
    logits = torch.cat([random_logits(n, seed=n) for n in (4, 2, 6, 3, 5)])
    runs, start = [], 0
    for count, sampling in zip((4, 2, 6, 3, 5), SAMPLINGS, strict=True):
        runs.append(SamplingRun(start, start + count, 30 + start, sampling))
        start += count
    sizes = [15, 3, 31, 1, 8]
    together = grow_trees(logits, runs, sizes)
    assert [len(tree.parents) for tree in together] == sizes
    for run, size, tree in zip(runs, sizes, together, strict=True):
        own = SamplingRun(0, run.end - run.start, run.first_position, run.params)
        (alone,) = grow_trees(logits[run.start : run.end], [own], [size])
        assert (alone.token_ids, alone.parents) == (tree.token_ids, tree.parents)
        assert alone.scores == pytest.approx(tree.scores, abs=1e-5)
    scores, ids = slot_candidates(logits, runs, 8)
    assert _grow_on_device(scores, ids, runs, sizes) == together


def test_few_candidates_make_small_trees() -> None:
    run = SamplingRun(0, 2, 5, SamplingParams(1.0, 1.0, 2, 3))
    (tree,) = grow_trees(random_logits(2), [run], [50])
    assert len(tree.parents) == 2 + 4
    (single,) = grow_trees(random_logits(1, vocab_size=9), [SamplingRun(0, 1, 5, GREEDY)], [50], 3)
    assert single.parents == [0, 0, 0]


class NoWaiting(TorchDispatchMode):
    """Refuses operators whose result, or whose shape, the host has to wait for."""

    WAITING = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "unique",
        "is_nonzero",
        "_to_copy",
    )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        kwargs = kwargs or {}
        is_conversion = name == "_to_copy" and "device" not in kwargs
        assert name not in self.WAITING or is_conversion, f"{name} waits for the device"
        return func(*args, **kwargs)


def test_the_device_is_not_waited_for() -> None:
    scores = random_logits(12).log_softmax(-1).sort(descending=True).values[:, :8]
    ids = torch.arange(8).expand(12, 8)
    with NoWaiting():
        packed = grow_together(scores.view(3, 4, 8), ids.reshape(3, 4, 8), 15)
    assert packed.shape == (3, 3, 15)
    with pytest.raises(AssertionError, match="waits"), NoWaiting():
        bool(scores.sum() > 0)
