"""How likely a row's first ``k`` draft tokens are all accepted, learned from outcomes.

The hazard ``h(k)`` is the probability that draft token ``k`` is accepted given that those before it were;
survival ``S(k) = h(1) ... h(k)`` falls with ``k`` whatever the counts say. Hazards are decayed Beta counts,
shrunk from a long memory to recent traffic, from there to the class of the request, and moved on the
log-odds scale by one number per draft width and one per request. A position without a fair trial (behind
the first rejection, a stop token, the length limit, or the verify width) is no observation at all: a
Kaplan-Meier estimate with fading memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gateway.coordinator.block_scheduler.records import FloatArray, RowOutcome, RowState

MOST_SHIFT = 3.0
"""Log-odds; a request's or a draft width's shift goes no further."""
FORGET_SHIFT = 1e-3
"""A score that has decayed below this is dropped."""


@dataclass(frozen=True, slots=True)
class SurvivalSettings:
    """How fast is learned, and from where. Decays are per observed step, a request's per cycle of its own."""

    prior_hazard: float = 0.75
    prior_trials: float = 4.0
    memory_decay: float = 0.9995
    recent_decay: float = 0.98
    shrink_trials: float = 8.0
    """Weight of the memory in recent hazards, and of those in a class's, in trials."""
    width_decay: float = 0.99
    width_prior: float = 8.0
    """Information (Fisher) that a draft width's shift starts with."""
    request_decay: float = 0.95
    request_prior: float = 2.0
    brier_decay: float = 0.99


class HazardCounts:
    """Decayed trials and successes per position. Owner: the estimator."""

    def __init__(self, num_positions: int) -> None:
        self.trials = np.zeros(num_positions)
        self.hits = np.zeros(num_positions)

    def add(self, trials: FloatArray, hits: FloatArray, decay: float) -> None:
        """Fade, then add one step's counts. Mutates."""
        self.trials *= decay
        self.trials += trials
        self.hits *= decay
        self.hits += hits

    def hazards(self, base: FloatArray | float, weight: float) -> FloatArray:
        """Hazards shrunk to ``base`` as if that were ``weight`` trials."""
        shrunk: FloatArray = (self.hits + weight * base) / (self.trials + weight)
        return shrunk

    def chained_hazards(self, first: float, weight: float) -> FloatArray:
        """Hazards that go on as at the position before where little is known."""
        hazards, before = [], first
        for hits, trials in zip(self.hits.tolist(), self.trials.tolist(), strict=True):
            before = (hits + weight * before) / (trials + weight)
            hazards.append(before)
        return np.array(hazards)


@dataclass(slots=True)
class Score:
    """A shift on the log-odds scale: what came minus what was expected, and its variance."""

    excess: float = 0.0
    information: float = 0.0

    def add(self, excess: float, information: float, decay: float) -> None:
        """Fade, then add. Mutates."""
        self.excess = self.excess * decay + excess
        self.information = self.information * decay + information

    def shift(self, prior: float) -> float:
        """One Newton step from zero."""
        moved = self.excess / (self.information + prior)
        return min(MOST_SHIFT, max(-MOST_SHIFT, moved))


class _Expected:
    """Hazards of a class at a draft width as cumulative sums: index ``t`` is over the first ``t``
    positions."""

    def __init__(self, hazards: FloatArray) -> None:
        self.hits: list[float] = [0.0, *np.cumsum(hazards).tolist()]
        self.information: list[float] = [0.0, *np.cumsum(hazards * (1 - hazards)).tolist()]


class SurvivalEstimator:
    """Survival of draft tokens per class, draft width and request.

    Owner: the block scheduler. ``observe`` and ``forget`` mutate, everything else reads.

    Args:
        max_draft_width: the drafter's block, anchor included.
        settings: rates and priors.
    """

    def __init__(self, max_draft_width: int, settings: SurvivalSettings | None = None) -> None:
        self._settings = settings or SurvivalSettings()
        self.num_positions = max_draft_width - 1
        self._memory = HazardCounts(self.num_positions)
        self._recent = HazardCounts(self.num_positions)
        self._classes: dict[str, HazardCounts] = {}
        self._widths: dict[int, Score] = {}
        self._requests: dict[int, Score] = {}
        self._brier_sum = self._brier_weight = 0.0
        self._logits: dict[tuple[str, int], FloatArray] = {}

    @property
    def brier_score(self) -> float:
        """Mean squared error of predicted hazards over recent trials; NaN before the first."""
        return self._brier_sum / self._brier_weight if self._brier_weight else float("nan")

    def survival(self, rows: Sequence[RowState], draft_width: int) -> FloatArray:
        """Return ``[rows, draft_width - 1]`` probabilities, falling along each row."""
        hazards = self._hazards([(r.seq_id, r.traffic) for r in rows], draft_width)
        return _float(np.cumprod(hazards, axis=1))

    def class_survival(self, traffic: str, draft_width: int) -> FloatArray:
        """Return ``[draft_width - 1]`` probabilities of a request of a class that nothing is known of."""
        return _float(np.cumprod(_sigmoid(self._class_logits(traffic, draft_width))))

    def observe(self, outcomes: Sequence[RowOutcome]) -> float:
        """Learn from one step's rows that drafted. Mutates.

        Returns:
            accepted draft tokens beyond what was expected of these trials; 0 without any.
        """
        drafted = [o for o in outcomes if o.draft_width > 1]
        if not drafted:
            return 0.0
        excess = self._score(drafted)
        self._count(drafted)
        self._logits.clear()
        return excess

    def forget(self, seq_id: int) -> None:
        """Drop what is known of a request that has ended. Mutates."""
        self._requests.pop(seq_id, None)

    def _hazards(self, rows: Sequence[tuple[int, str]], draft_width: int) -> FloatArray:
        prior, requests = self._settings.request_prior, self._requests
        base = np.stack([self._class_logits(traffic, draft_width) for _, traffic in rows])
        shifts = [
            requests[seq_id].shift(prior) if seq_id in requests else 0.0 for seq_id, _ in rows
        ]
        return _sigmoid(base + np.array(shifts)[:, None])

    def _class_logits(self, traffic: str, draft_width: int) -> FloatArray:
        key = (traffic, draft_width)
        if key not in self._logits:
            logits = _logit(self._class_hazards(traffic)[: draft_width - 1])
            self._logits[key] = logits + self._width_shift(draft_width)
        return self._logits[key]

    def _class_hazards(self, traffic: str) -> FloatArray:
        """A class's hazards at a draft width of no particular effect."""
        settings = self._settings
        memory = self._memory.chained_hazards(settings.prior_hazard, settings.prior_trials)
        hazards = self._recent.hazards(memory, settings.shrink_trials)
        if traffic in self._classes:
            hazards = self._classes[traffic].hazards(hazards, settings.shrink_trials)
        return hazards

    def _width_shift(self, draft_width: int) -> float:
        score = self._widths.get(draft_width)
        return score.shift(self._settings.width_prior) if score else 0.0

    def _count(self, outcomes: Sequence[RowOutcome]) -> None:
        settings = self._settings
        by_cell: dict[tuple[str, int], list[RowOutcome]] = {}
        for outcome in outcomes:
            by_cell.setdefault((outcome.traffic, outcome.draft_width), []).append(outcome)
        by_class: dict[str, FloatArray] = {}
        for (traffic, width), mine in by_cell.items():
            counts = self._counts_at_no_width(traffic, width, mine)
            by_class[traffic] = by_class[traffic] + counts if traffic in by_class else counts
        for traffic, counts in by_class.items():
            of_class = self._classes.setdefault(traffic, HazardCounts(self.num_positions))
            of_class.add(counts[0], counts[1], settings.recent_decay)
        trials, hits = sum(by_class.values(), np.zeros((2, self.num_positions)))
        self._memory.add(trials, hits, settings.memory_decay)
        self._recent.add(trials, hits, settings.recent_decay)

    def _counts_at_no_width(
        self, traffic: str, width: int, outcomes: list[RowOutcome]
    ) -> FloatArray:
        """Trials and successes ``[2, positions]``, the draft width's expected effect taken out."""
        trials = self._reached([o.num_trials for o in outcomes])
        hits = self._reached([o.num_accepted for o in outcomes])
        shift = self._width_shift(width)
        if shift:
            hazards = self._class_hazards(traffic)
            effect = _sigmoid(_logit(hazards) + shift) - hazards
            hits = np.clip(hits - trials * effect, 0.0, trials)
        return np.stack([trials, hits])

    def _reached(self, lengths: list[int]) -> FloatArray:
        """How many of ``lengths`` reach each position."""
        ends = np.bincount(np.array(lengths), minlength=self.num_positions + 1)
        reached: FloatArray = np.cumsum(ends[::-1])[::-1][1:].astype(np.float64)
        return reached

    def _score(self, outcomes: Sequence[RowOutcome]) -> float:
        """Update shifts and the Brier score against what was expected before this step."""
        settings = self._settings
        expected: dict[tuple[str, int], _Expected] = {}
        by_width: dict[int, list[RowOutcome]] = {}
        for o in outcomes:
            key = (o.traffic, o.draft_width)
            if key not in expected:
                expected[key] = _Expected(_sigmoid(self._class_logits(*key)))
            by_width.setdefault(o.draft_width, []).append(o)
        self._score_predictions(by_width)
        total = 0.0
        for width, mine in by_width.items():
            excess = information = 0.0
            for o in mine:
                of = expected[o.traffic, width]
                more = o.num_accepted - of.hits[o.num_trials]
                spread = of.information[o.num_trials]
                excess, information = excess + more, information + spread
                score = self._requests.setdefault(o.seq_id, Score())
                score.add(more, spread, settings.request_decay)
            # What it was expected to give already has the shift in it; only the rest of it moves.
            score = self._widths.setdefault(width, Score())
            kept = score.shift(settings.width_prior)
            score.add(excess + kept * information, information, settings.width_decay)
            total += excess
        return total

    def _score_predictions(self, by_width: dict[int, list[RowOutcome]]) -> None:
        decay = self._settings.brier_decay
        self._brier_sum *= decay
        self._brier_weight *= decay
        for width, mine in by_width.items():
            predicted = self._hazards([(o.seq_id, o.traffic) for o in mine], width)
            position = np.arange(1, width)
            trials = position <= np.array([o.num_trials for o in mine])[:, None]
            hits = position <= np.array([o.num_accepted for o in mine])[:, None]
            self._brier_sum += float(np.sum((predicted - hits) ** 2 * trials))
            self._brier_weight += float(np.sum(trials))


def _float(values: np.ndarray[Any, Any]) -> FloatArray:
    return values.astype(np.float64, copy=False)


def _sigmoid(logits: FloatArray) -> FloatArray:
    values: FloatArray = 1.0 / (1.0 + np.exp(-logits))
    return values


def _logit(probabilities: FloatArray) -> FloatArray:
    inside = np.clip(probabilities, 1e-4, 1 - 1e-4)
    return np.log(inside / (1 - inside))
