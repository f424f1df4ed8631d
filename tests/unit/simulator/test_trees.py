"""Simulated trees: the likeliest paths, shared out by worth, and a gain where passes are bound by memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from gateway.coordinator.block_scheduler.records import TREES, TreeShare
from loadtest.simulator.trees import compare, grow, shared_out


def test_the_likeliest_paths_are_grown() -> None:
    rng = np.random.default_rng(1)
    chances = -np.sort(-rng.random((3, 3)), axis=1)
    nodes = grow(chances, 39)
    paths = [p for depth in (1, 2, 3) for p in itertools.product(range(3), repeat=depth)]
    expected = sorted(
        (-float(np.log([chances[i, r] for i, r in enumerate(p)]).sum()), p) for p in paths
    )
    assert [node.path for node in nodes] == [path for _, path in expected]
    assert [node.path for node in grow(chances, 7)] == [path for _, path in expected[:7]]


def test_the_best_nodes_of_all_trees_are_taken() -> None:
    sure, unsure = np.array([[0.9, 0.05]] * 4), np.array([[0.2, 0.1]] * 4)
    maps = {"": np.exp(np.linspace(-8, 0, 33)).tolist()}
    share = TreeShare(TREES + 5, 9, [0, 4], [1.0, 1.0], maps, 1.0, 1.0)
    assert shared_out([grow(sure, 8), grow(unsure, 8)], ["", ""], share) == [4, 0]


@pytest.mark.parametrize(
    ("load", "least"), [(("memory-bound", "prose", 4), 1.15), (("cpu", "math", 4), 0.93)]
)
def test_trees_gain_where_passes_are_bound_by_memory(
    load: tuple[str, str, int], least: float
) -> None:
    assert compare(load, 500).ratio > least
