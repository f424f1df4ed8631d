"""Draft trees, simulated: ``python -m loadtest.simulator.trees``.

The worlds are those of chains: the likeliest token of a slot is right as often as there. What is added is how
sure the drafter is, which differs from cycle to cycle around that, and where the right token ranks when it is
not the first. The scheduler shares nodes out as when it is served, and is compared with itself without trees.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from heapq import heappop, heappush
from itertools import product
from multiprocessing import get_context
from statistics import geometric_mean
from typing import NamedTuple

import numpy as np

from gateway.coordinator.block_scheduler.records import (
    Decision,
    FloatArray,
    IntArray,
    TreeRowOutcome,
    TreeShare,
)
from gateway.coordinator.block_scheduler.scheduler import SchedulerSettings
from gateway.coordinator.block_scheduler.trees import BIN_SCORES, packed_scores
from loadtest.simulator.costs import COSTS
from loadtest.simulator.loop import Phase, Policy, Run, Scenario, simulate
from loadtest.simulator.matrix import adaptive
from loadtest.simulator.run_record import RunRecord
from loadtest.simulator.worlds import TRAFFICS

STREAMS = (1, 4, 16, 32)
CONFIDENCE = 6.0
"""Counts of the beta distribution that the chance of a slot's first token is drawn from, cycle by cycle."""
OTHER_RANKS: FloatArray = np.array([0.45, 0.2, 0.1, 0.06, 0.04, 0.03, 0.02])
"""Where the right token ranks, from the second place on, when it is not the first."""
WARM_UP = 0.25


class Node(NamedTuple):
    """A node of a simulated tree."""

    score: float
    path: tuple[int, ...]
    """Ranks of its tokens, from the anchor on."""


def grow(chances: FloatArray, most: int) -> list[Node]:
    """Return the ``most`` likeliest paths, best first.

    Args:
        chances: ``[slots, ranks]``, falling along a slot.
        most: nodes.
    """
    logs = np.log(np.maximum(chances, 1e-12)).tolist()
    heap: list[tuple[float, tuple[int, ...]]] = [(-logs[0][0], (0,))]
    nodes: list[Node] = []
    while heap and len(nodes) < most:
        negative, path = heappop(heap)
        nodes.append(Node(-negative, path))
        depth, rank = len(path), path[-1]
        if rank + 1 < len(logs[0]):
            sibling = negative + logs[depth - 1][rank] - logs[depth - 1][rank + 1]
            heappush(heap, (sibling, (*path[:-1], rank + 1)))
        if depth < len(logs):
            heappush(heap, (negative - logs[depth][0], (*path, 0)))
    return nodes


def shared_out(trees: Sequence[Sequence[Node]], tags: Sequence[str], share: TreeShare) -> list[int]:
    """Return how many nodes of each tree are worth their time, as the drafter finds it."""
    likely = [
        np.interp([node.score for node in tree], BIN_SCORES, share.acceptance[tag])
        for tree, tag in zip(trees, tags, strict=True)
    ]
    order = np.argsort(-np.concatenate(likely), kind="stable")
    sums = np.concatenate([[0.0], np.concatenate(likely)[order].cumsum()])
    counts = np.minimum(share.num_nodes, len(order))
    best = counts[int(((len(trees) + sums[counts]) / np.array(share.step_ms)).argmax())]
    owners = np.repeat(np.arange(len(trees)), [len(tree) for tree in trees])
    shares: list[int] = np.bincount(owners[order[:best]], minlength=len(trees)).tolist()
    return shares


class TreeRun(Run):
    """A run in which policies may ask for trees."""

    has_trees = True

    def __init__(self, policy: Policy, scenario: Scenario) -> None:
        super().__init__(policy, scenario)
        self._rng = np.random.default_rng([scenario.seed, 7])

    def _play_trees(self, step: int, decision: Decision, context: int) -> int:
        share, streams = decision.tree, self._streams
        assert share is not None
        drafted = decision.draft_width
        hazards = self._hazards(drafted).astype(np.float64)
        inside = np.clip(hazards, 0.01, 0.99)
        sure = self._rng.beta(CONFIDENCE * inside, CONFIDENCE * (1.0 - inside))  # [R, slots]
        chances = np.concatenate(
            [sure[:, :, None], (1.0 - sure)[:, :, None] * OTHER_RANKS], axis=2
        )  # [R, slots, ranks]
        chances = -np.sort(-chances, axis=2)
        trees = [grow(mine, share.most_width - 1) for mine in chances]
        counts = shared_out(trees, streams.tags, share)
        ranks = self._right_ranks(chances)
        outcomes, expected = [], 0.0
        committed = np.ones(len(trees), np.int64)
        for row, (tree, count) in enumerate(zip(trees, counts, strict=True)):
            right = tuple(ranks[row].tolist())
            chain = next((d for d, rank in enumerate(right) if rank), len(right))
            depth = sum(1 for node in tree[:count] if not any(node.path))  # of the chain within
            hits = [i for i, n in enumerate(tree[:count]) if n.path == right[: len(n.path)]]
            committed[row] += len(hits)
            left = int(streams.remaining[row])
            expected += 1.0 + sum(np.exp(n.score) for n in tree[:count] if len(n.path) < left)
            scores = packed_scores([node.score for node in tree])
            outcomes.append(
                TreeRowOutcome(
                    streams.seq_ids[row],
                    streams.tags[row],
                    drafted,
                    count,
                    hits,
                    scores,
                    1 + len(hits),
                    False,
                    min(depth, chain + 1),
                    min(depth, chain),
                )
            )
        committed = np.minimum(committed, streams.remaining)
        num_positions = len(trees) + sum(counts)
        outcome = self._outcome(decision, num_positions, drafted, len(trees), context)
        outcome = outcome._replace(trees=outcomes, draft_width=share.draft_width)
        self._observe(step, outcome, int(committed.sum()), expected)
        for seq_id in streams.commit(committed):
            self._policy.forget(seq_id)
        return int(committed.sum())

    def _right_ranks(self, chances: FloatArray) -> IntArray:
        """Draw the rank of the right token of every slot ``[R, slots]``; beyond the last if it has none."""
        luck = self._rng.random(chances.shape[:2])
        ranks: IntArray = (luck[:, :, None] >= chances.cumsum(axis=2)).sum(axis=2)
        return ranks


class Gain(NamedTuple):
    """One load with trees and without."""

    cost: str
    traffic: str
    num_streams: int
    with_trees: float
    """Tokens per second, luck left out."""
    with_chains: float

    @property
    def ratio(self) -> float:
        """What trees gain."""
        return self.with_trees / self.with_chains


def compare(load: tuple[str, str, int], tokens_per_stream: int) -> Gain:
    """Run one load with trees and without."""
    cost, traffic, streams = load
    tokens = tokens_per_stream * max(streams, 4)
    phase = Phase(0, TRAFFICS[traffic], streams)
    scenario = Scenario((phase,), COSTS[cost], tokens, max_tokens=tokens)

    def rate(record: RunRecord) -> float:
        return record.expected_throughput(record.first_step(int(WARM_UP * tokens)))

    settings = SchedulerSettings(allows_trees=True)
    trees = TreeRun(adaptive(scenario.cost, 0, settings), scenario).play()
    chains = simulate(adaptive(scenario.cost, 0), scenario)
    return Gain(cost, traffic, streams, rate(trees), rate(chains))


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare all loads and print them."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.simulator.trees")
    parser.add_argument("--tokens", type=int, default=1500, help="per stream")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args(arguments)
    loads = list(product(COSTS, TRAFFICS, STREAMS))
    run = partial(compare, tokens_per_stream=options.tokens)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        gains = list(pool.map(run, loads))
    print("simulated tokens per second: adaptive with trees over adaptive with chains")
    print(f"{'cost':15}{'traffic':10}" + "".join(f"{n:>8}" for n in STREAMS))
    for cost, traffic in product(COSTS, TRAFFICS):
        mine = [gain for gain in gains if (gain.cost, gain.traffic) == (cost, traffic)]
        print(f"{cost:15}{traffic:10}" + "".join(f"{gain.ratio:8.3f}" for gain in mine))
    print(f"geometric mean {geometric_mean(gain.ratio for gain in gains):.3f}")
    least = min(gain.ratio for gain in gains)
    print(f"least {least:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
