"""What draft trees are worth, learned from trees that were verified.

The drafter orders a tree's nodes by the probability that it gives their paths. Two things are learned per
class of requests. The *calibration* says how often nodes of such a score are accepted: one map that rises
with the score, from the nodes that were verified. The *curve* says how likely the best, second best, ... node
of a tree to come will be accepted, which prices trees before they exist; it is the mean of calibrated scores
by rank, so it needs no luck of acceptance to settle, and it is moved on the log-odds scale by one number per
request, as in ``survival``.

Every node verified is a trial: the target's tokens decide it whichever path it is on. A row that a stop token
cut says nothing, for what would have come behind is nobody's text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_wire.ports import MAX_TREE_POSITIONS
from dflash_wire.trees import LEAST_BIN_SCORE, NUM_SCORE_BINS, unpacked_scores
from dflash_wire.trees import packed_scores as packed_scores
from gateway.coordinator.block_scheduler.allocation import Option
from gateway.coordinator.block_scheduler.records import (
    FloatArray,
    IntArray,
    RowState,
    TreeRowOutcome,
    TreeShare,
    block_width,
)
from gateway.coordinator.block_scheduler.survival import NO_SCORE, HazardCounts, Score

LEAST_PROBABILITY = 1e-4
"""Survival is taken to be so far away from 0 and 1."""
MOST_NODES = MAX_TREE_POSITIONS - 1
WEIGHED_NODES = 96
"""Nodes that all rows together are weighed for at least; few rows have deep trees, many have small ones."""
LEAST_MOST = 15
"""Nodes that each row is weighed for at least."""
MOST_SHARES = 24
"""Numbers of nodes that the drafter chooses among."""
SPARE_NODES = 6
"""The drafter makes so many nodes per row more than twice what is expected to be verified."""
Chains = Callable[[str, int], FloatArray]
"""Survival ``[block - 1]`` of chains of a class out of blocks of a width."""
_Kind = tuple[str, int]
"""Class of the requests, and width of the blocks."""
_BIN_WIDTH = -LEAST_BIN_SCORE / (NUM_SCORE_BINS - 1)
BIN_SCORES: FloatArray = np.linspace(LEAST_BIN_SCORE, 0.0, NUM_SCORE_BINS)


def prior_curve(survival: FloatArray, power: float) -> FloatArray:
    """Return ``[MOST_NODES]`` probabilities that nothing but chains speaks for, falling.

    Args:
        survival: ``[block - 1]`` of chains.
        power: below 1.
    """
    own = np.clip(survival, LEAST_PROBABILITY, 1.0 - LEAST_PROBABILITY) ** power
    rank = np.arange(1, MOST_NODES + 1, dtype=np.float64)
    curve = own[-1] * len(own) / rank
    curve[: len(own)] = own[:MOST_NODES]
    falling: FloatArray = np.minimum.accumulate(curve)
    return falling


def blocks_within(wanted: Sequence[int], most: int) -> list[int]:
    """Return the widths of the blocks that trees come out of: the wanted ones that exist, and the widest."""
    return sorted({width for width in (*wanted, most) if 1 < width <= most})


def most_nodes(num_rows: int) -> int:
    """Return the nodes of a row that are weighed at most."""
    return max(LEAST_MOST, min(MOST_NODES, WEIGHED_NODES // num_rows))


@dataclass(frozen=True, slots=True)
class TreeSettings:
    """How fast is learned. Decays are per observed step, a request's per cycle of its own."""

    calibration_decay: float = 0.998
    calibration_prior: float = 6.0
    """Trials per bin that the drafter's own probability counts as."""
    curve_decay: float = 0.98
    prior_power: float = 0.85
    """The prior curve is chains' survival to this power: a tree has the chain's nodes, or better ones."""
    curve_prior: float = 2.0
    """Rows that it counts as."""
    smooth_rows: float = 24.0
    """Weight of what is known of a rank in the next one, in rows."""
    request_decay: float = 0.95
    request_prior: float = 8.0
    gain_decay: float = 0.99
    gain_prior: float = 64.0
    """Tokens that are expected to come as predicted."""


class Calibration:
    """How often nodes of a score are accepted. Owner: the estimator."""

    def __init__(self) -> None:
        self._trials = np.zeros(NUM_SCORE_BINS)
        self._hits = np.zeros(NUM_SCORE_BINS)
        self._map: FloatArray | None = None

    def add(self, scores: FloatArray, is_hit: FloatArray, decay: float) -> None:
        """Fade, then add nodes; each counts for the two bins around its score. Mutates."""
        place = np.clip((scores - LEAST_BIN_SCORE) / _BIN_WIDTH, 0.0, NUM_SCORE_BINS - 1.0)
        low = np.minimum(place.astype(np.int64), NUM_SCORE_BINS - 2)
        share = place - low
        self._trials *= decay
        self._hits *= decay
        for bins, weights in ((low, 1.0 - share), (low + 1, share)):
            self._trials += np.bincount(bins, weights, NUM_SCORE_BINS)
            self._hits += np.bincount(bins, weights * is_hit, NUM_SCORE_BINS)
        self._map = None

    def probabilities(self, prior: float) -> FloatArray:
        """Return ``[NUM_SCORE_BINS]`` probabilities at the bins' scores, rising."""
        if self._map is None:
            trials = self._trials + prior
            hits = self._hits + prior * np.exp(BIN_SCORES)
            self._map = _rising(hits / trials, trials)
        return self._map


def _rising(values: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the rising sequence that is nearest in weighted squares (pool adjacent violators)."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, total, length = value, weight, 1
        while blocks and blocks[-1][0] > mean:
            before, more, longer = blocks.pop()
            mean = (mean * total + before * more) / (total + more)
            total, length = total + more, length + longer
        blocks.append((mean, total, length))
    return np.repeat([mean for mean, _, _ in blocks], [length for _, _, length in blocks])


class TreeGain:
    """What trees that are shared out by their scores give beyond what the mean curve says.

    The drafter chooses the number of nodes when it knows their scores, so it takes more tokens in the
    time, and other times, than the plan that the curve suggests. Owner: the estimator.
    """

    def __init__(self, prior: float) -> None:
        self._tokens = [prior, prior]
        self._times = [prior, prior]

    def add(
        self, expected: float, observed: float, planned_ms: float, priced_ms: float, decay: float
    ) -> None:
        """Fade, then add one step: tokens, and the prices of the planned and of the taken number of nodes.
        Mutates."""
        scale = expected / planned_ms  # both in tokens, so that one prior serves both
        for sums, new in (
            (self._tokens, (expected, observed)),
            (self._times, (planned_ms * scale, priced_ms * scale)),
        ):
            sums[0] = sums[0] * decay + new[0]
            sums[1] = sums[1] * decay + new[1]

    @property
    def tokens(self) -> float:
        """Observed over expected tokens."""
        return self._tokens[1] / self._tokens[0]

    @property
    def time(self) -> float:
        """Price of what was taken over the price of what was planned."""
        return self._times[1] / self._times[0]


class TreeEstimator:
    """Calibrations, curves and shifts of trees.

    Owner: the block scheduler. ``observe`` and ``forget`` mutate, everything else reads.

    Args:
        settings: rates and priors.
    """

    def __init__(self, settings: TreeSettings | None = None) -> None:
        self._settings = settings or TreeSettings()
        self._calibrations: dict[_Kind, Calibration] = {}
        self._curves: dict[_Kind, HazardCounts] = {}
        self._odds: dict[_Kind, FloatArray] = {}
        self._requests: dict[int, Score] = {}
        self.gain = TreeGain(self._settings.gain_prior)

    def acceptance(self, traffic: str, drafted: int) -> FloatArray:
        """Return ``[NUM_SCORE_BINS]`` probabilities of nodes of a class at the bins' scores, rising.

        Args:
            traffic: class of the requests.
            drafted: width of the blocks that the trees come out of.
        """
        calibration = self._calibrations.get((traffic, drafted)) or Calibration()
        return calibration.probabilities(self._settings.calibration_prior)

    def expected(self, rows: Sequence[RowState], drafted: int, chains: Chains) -> FloatArray:
        """Return ``[rows, MOST_NODES]`` probabilities of each row's nodes to come, falling along a row.

        Args:
            rows: to have trees.
            drafted: width of the blocks that these come out of.
            chains: survival of chains, by class and block.
        """
        shifts = [self._requests.get(row.seq_id, NO_SCORE).shift for row in rows]
        of_class = {
            traffic: self._curve_odds((traffic, drafted), chains)
            for traffic in dict.fromkeys(row.traffic for row in rows)
        }
        odds = np.stack([of_class[row.traffic] for row in rows]) * np.exp(shifts)[:, None]
        falling: FloatArray = odds / (1.0 + odds)
        return falling

    def observe(self, outcomes: Sequence[TreeRowOutcome], chains: Chains) -> None:
        """Learn from the tree rows of one step. Mutates.

        Args:
            outcomes: of the step.
            chains: as in ``expected``.
        """
        by_kind: dict[_Kind, list[TreeRowOutcome]] = {}
        for outcome in outcomes:
            if outcome.scores and not outcome.is_cut:
                by_kind.setdefault((outcome.traffic, outcome.block_width), []).append(outcome)
        for kind, mine in by_kind.items():
            self._learn(kind, mine, chains)

    def share(
        self, rows: Sequence[RowState], option: Option, num_nodes: IntArray, step_ms: FloatArray
    ) -> TreeShare:
        """Return how the nodes of a step's trees are to be shared out.

        Args:
            rows: of the step.
            option: what is expected of it, gain included.
            num_nodes: ``[sizes]`` nodes of all rows to choose from, ascending, 0 first.
            step_ms: ``[sizes]`` what the step takes.
        """
        drafted = block_width(option.draft_width)
        planned = option.num_positions - len(rows)
        per_row = -(-planned // len(rows))
        most_width = min(MAX_TREE_POSITIONS, 1 + SPARE_NODES + 2 * per_row)
        fitting = int(np.searchsorted(num_nodes, len(rows) * (most_width - 1)))
        stride = -(-(fitting + 1) // MOST_SHARES)
        classes = dict.fromkeys(row.traffic for row in rows)
        return TreeShare(
            option.draft_width,
            most_width,
            num_nodes[: fitting + 1 : stride].tolist(),
            step_ms[: fitting + 1 : stride].tolist(),
            {traffic: self.acceptance(traffic, drafted).tolist() for traffic in classes},
            len(rows) + (option.tokens - len(rows)) / self.gain.tokens,
            option.step_ms / self.gain.time,
        )

    def observe_gain(self, share: TreeShare, num_nodes: int, num_tokens: int) -> None:
        """Learn from what a shared step took and gave. Mutates."""
        priced_ms = float(np.interp(num_nodes, share.num_nodes, share.step_ms))
        self.gain.add(
            share.expected_tokens,
            num_tokens,
            share.expected_ms,
            priced_ms,
            self._settings.gain_decay,
        )

    def forget(self, seq_id: int) -> None:
        """Drop what is known of a request that has ended. Mutates."""
        self._requests.pop(seq_id, None)

    @property
    def num_requests(self) -> int:
        """Requests that something is known of."""
        return len(self._requests)

    def _curve_odds(self, kind: _Kind, chains: Chains) -> FloatArray:
        if kind in self._odds:
            return self._odds[kind]
        settings, curve = self._settings, self._curves.get(kind)
        prior = prior_curve(chains(*kind), settings.prior_power)
        if curve is None:  # chains are learned meanwhile
            return prior / (1.0 - prior)
        log_odds = np.log(prior / (1.0 - prior)).tolist()
        moved = curve.log_odds(log_odds, settings.curve_prior, settings.smooth_rows)
        self._odds[kind] = np.minimum.accumulate(np.exp(moved))
        return self._odds[kind]

    def _learn(self, kind: _Kind, rows: list[TreeRowOutcome], chains: Chains) -> None:
        settings = self._settings
        calibration = self._calibrations.setdefault(kind, Calibration())
        curve = self._curves.setdefault(kind, HazardCounts(MOST_NODES))
        odds = self._curve_odds(kind, chains)
        trials, likely = np.zeros(MOST_NODES), np.zeros(MOST_NODES)
        scores_of = [np.array(unpacked_scores(row.scores))[:MOST_NODES] for row in rows]
        verified, hits = [], []
        for row, scores in zip(rows, scores_of, strict=True):
            is_hit = np.zeros(row.num_nodes)
            is_hit[row.accepted_nodes] = 1.0
            verified.append(scores[: row.num_nodes])
            hits.append(is_hit)
            self._score_request(row, odds)
        probabilities = calibration.probabilities(settings.calibration_prior)
        for scores in scores_of:
            trials[: len(scores)] += 1.0
            likely[: len(scores)] += np.interp(scores, BIN_SCORES, probabilities)
        calibration.add(np.concatenate(verified), np.concatenate(hits), settings.calibration_decay)
        curve.add(trials, likely, settings.curve_decay)
        self._odds.pop(kind, None)

    def _score_request(self, row: TreeRowOutcome, odds: FloatArray) -> None:
        """Move a request's shift by what its tree gave beyond the class's curve. Mutates."""
        settings = self._settings
        score = self._requests.setdefault(row.seq_id, Score())
        mine = odds[: row.num_nodes] * np.exp(score.shift)
        expected = mine / (1.0 + mine)
        score.add(
            len(row.accepted_nodes) - float(expected.sum()),
            float((expected * (1.0 - expected)).sum()),
            settings.request_decay,
            settings.request_prior,
        )
