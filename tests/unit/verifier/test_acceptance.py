"""Acceptance against brute force on chains and a naive walk on trees."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from random_trees import random_tree

from verifier.acceptance import accept, ancestor_mask, chain_parents, chain_within, depths

pytestmark = pytest.mark.unit

MAX_DRAFTS = 4


@pytest.mark.parametrize("num_drafts", range(MAX_DRAFTS + 1))
@pytest.mark.parametrize("alphabet", [2, 3])
def test_every_chain(num_drafts: int, alphabet: int) -> None:
    """All drafts and all targets: the longest matching prefix plus the target's own next token."""
    parents = chain_parents(num_drafts)
    for drafts in itertools.product(range(alphabet), repeat=num_drafts):
        for target in itertools.product(range(alphabet), repeat=num_drafts + 1):
            num_accepted = max(n for n in range(num_drafts + 1) if drafts[:n] == target[:n])
            acceptance = accept(drafts, target, parents)
            assert acceptance.nodes == list(range(num_accepted + 1))
            assert acceptance.token_ids == [*drafts[:num_accepted], target[num_accepted]]


def path_to_anchor(parents: list[int], node: int) -> list[int]:
    path = [node]
    while path[-1]:
        path.append(parents[path[-1] - 1])
    return path[::-1]


def naive_walk(parents: list[int], drafts: list[int], target: list[int]) -> list[int]:
    nodes = [0]
    while True:
        matches = [
            j + 1
            for j, parent in enumerate(parents)
            if parent == nodes[-1] and drafts[j] == target[parent]
        ]
        if not matches:
            return nodes
        nodes.append(matches[0])


@pytest.mark.parametrize("seed", range(200))
def test_random_trees(seed: int) -> None:
    rng = random.Random(seed)
    num_drafts = rng.randint(1, 12)
    parents = random_tree(rng, num_drafts)
    drafts = [rng.randrange(3) for _ in range(num_drafts)]
    target = [rng.randrange(3) for _ in range(num_drafts + 1)]
    acceptance = accept(drafts, target, parents)
    assert acceptance.nodes == naive_walk(parents, drafts, target)
    assert acceptance.nodes == path_to_anchor(parents, acceptance.nodes[-1])
    assert acceptance.token_ids == [target[node] for node in acceptance.nodes]
    assert acceptance.token_ids[:-1] == [drafts[node - 1] for node in acceptance.nodes[1:]]


@pytest.mark.parametrize("seed", range(50))
def test_accepted_path_is_the_deepest(seed: int) -> None:
    """Without equal siblings no other path of the target's own choices reaches further."""
    rng = random.Random(seed)
    parents = random_tree(rng, rng.randint(1, 12))
    drafts = [parents[:j].count(parent) for j, parent in enumerate(parents)]
    target = [rng.randrange(2) for _ in range(len(parents) + 1)]
    valid = []
    for node in range(len(parents) + 1):
        path = path_to_anchor(parents, node)
        steps = itertools.pairwise(path)
        if all(drafts[child - 1] == target[parent] for parent, child in steps):
            valid.append(path)
    assert accept(drafts, target, parents).nodes == max(valid, key=len)


def test_first_of_equal_siblings_wins_and_both_commit_the_same() -> None:
    acceptance = accept([5, 5, 6], [5, 6, 6, 9], [0, 0, 1])
    assert acceptance.nodes == [0, 1, 3]
    assert acceptance.token_ids == [5, 6, 9]


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError):
        accept([1, 2], [1, 2, 3], [0])


@pytest.mark.parametrize("seed", range(40))
def test_depths_and_ancestors(seed: int) -> None:
    rng = random.Random(seed)
    num_drafts = rng.randint(0, 10)
    parents = chain_parents(num_drafts) if seed % 4 == 0 else random_tree(rng, num_drafts)
    paths = [path_to_anchor(parents, node) for node in range(num_drafts + 1)]
    assert depths(parents) == [len(path) - 1 for path in paths]
    mask = ancestor_mask(parents)
    assert mask.dtype == torch.bool
    expected = [[key in path for key in range(num_drafts + 1)] for path in paths]
    assert mask.tolist() == expected


@pytest.mark.parametrize(
    ("parents", "nodes", "expected"),
    [
        ([], [0], (0, 0)),
        ([0, 1, 2], [0], (1, 0)),
        ([0, 1, 2], [0, 1], (2, 1)),
        ([0, 1, 2], [0, 1, 2, 3], (3, 3)),
        ([0, 0, 1], [0, 2], (1, 0)),
        ([0, 0, 1, 1], [0, 1, 4], (2, 1)),
        ([0, 0, 2], [0, 1], (1, 1)),
    ],
)
def test_how_the_chain_within_a_tree_fared(
    parents: list[int], nodes: list[int], expected: tuple[int, int]
) -> None:
    assert chain_within(parents, nodes) == expected
