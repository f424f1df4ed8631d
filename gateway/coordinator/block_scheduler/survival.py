"""How likely a row's first ``k`` draft tokens are all accepted, learned from outcomes.

The hazard ``h(k)`` is the probability that draft token ``k`` is accepted given that those before it were;
survival ``S(k) = h(1) ... h(k)`` falls with ``k`` whatever the counts say. Hazards are decayed Beta counts,
shrunk from a long memory to recent traffic, from there to the class of the request, and moved on the
log-odds scale by one number per draft width and one per request. A position without a fair trial (behind
the first rejection, a stop token, the length limit, or the verify width) is no observation at all: a
Kaplan-Meier estimate with fading memory.

What came beyond what was expected is shared out by doubt: counts learn what the two shifts do not explain,
and a shift learns little while the other levels are still in doubt. Else a draft width that happens to be
the first one in use would take for its own merit what any width would have had.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gateway.coordinator.block_scheduler.records import FloatArray, RowOutcome, RowState

MOST_SHIFT = 3.0
"""Log-odds; a request's or a draft width's shift goes no further."""
LEAST_HAZARD = 1e-4
"""Hazards stay so far away from 0 and 1."""
REFRESH_STEPS = 32
"""The memory's hazards are at most so many steps old."""


@dataclass(frozen=True, slots=True)
class SurvivalSettings:
    """How fast is learned, and from where. Decays are per observed step, a request's per cycle of its own."""

    prior_hazard: float = 0.75
    prior_trials: float = 4.0
    memory_decay: float = 0.9995
    recent_decay: float = 0.98
    surprised_decay: float = 0.7
    """Instead, for recent and class counts, in a step that contradicts them."""
    surprise: float = 3.0
    """Standard deviations that are a contradiction."""
    shrink_trials: float = 8.0
    """Weight of the memory in recent hazards, and of those in a class's, in trials."""
    smooth_trials: float = 48.0
    """Weight of what is known of a position in the hazard of the next one."""
    width_decay: float = 0.99
    width_unit: float = 8.0
    """Information per decay: a draft width forgets by what it learns, or it would know little at few rows."""
    width_prior: float = 320.0
    """Information (Fisher) that a draft width's shift starts with."""
    request_decay: float = 0.95
    request_prior: float = 4.0
    crowd: float = 4.0
    """Rows that must be alike before half of what they have in common is taken for the traffic's."""
    common_decay: float = 0.995
    """Of what requests usually have in common: those that accept little stay longer, so it is below 0."""
    brier_decay: float = 0.99


class HazardCounts:
    """Decayed trials and successes per position. Owner: the estimator."""

    def __init__(self, num_positions: int) -> None:
        self.trials = np.zeros(num_positions)
        self.hits = np.zeros(num_positions)

    def add(self, trials: FloatArray, hits: FloatArray, decay: float) -> None:
        """Fade, then add counts; ``hits`` with shifts taken out need not lie within trials. Mutates."""
        self.trials = self.trials * decay + trials
        self.hits = np.clip(self.hits * decay + hits, 0.0, self.trials)

    def log_odds(self, base: Sequence[float], weight: float, smooth_weight: float) -> list[float]:
        """Log-odds of hazards, shrunk to ``base`` as if that were ``weight`` trials of the first position.

        What a position differs from its base by is expected of the next one too, as if that were
        ``smooth_weight`` trials.
        """
        shrunk, moved = [], 0.0
        for hits, trials, plain in zip(self.hits.tolist(), self.trials.tolist(), base, strict=True):
            expected = 1.0 / (1.0 + math.exp(-plain - moved))
            hazard = (hits + weight * expected) / (trials + weight)
            inside = min(1.0 - LEAST_HAZARD, max(LEAST_HAZARD, hazard))
            log_odds = math.log(inside / (1.0 - inside))
            moved, weight = log_odds - plain, smooth_weight
            shrunk.append(log_odds)
        return shrunk


@dataclass(slots=True)
class Score:
    """A shift on the log-odds scale: what came minus what was expected without it, and its information.

    Owner: the estimator.
    """

    excess: float = 0.0
    information: float = 0.0
    shift: float = 0.0
    """The most likely shift, shrunk to 0 by the prior's information."""

    def add(self, excess: float, information: float, decay: float, prior: float) -> None:
        """Fade, then add what came beyond what was expected with the present shift. Mutates."""
        self.excess = self.excess * decay + excess + self.shift * information
        self.information = self.information * decay + information
        moved = self.excess / (self.information + prior)
        self.shift = min(MOST_SHIFT, max(-MOST_SHIFT, moved))


@dataclass(slots=True)
class DecayedMean:
    """A mean with fading memory. Owner: the estimator."""

    total: float = 0.0
    weight: float = 0.0

    @property
    def value(self) -> float:
        """The mean; NaN before the first value."""
        return self.total / self.weight if self.weight else float("nan")

    def add(self, total: float, weight: float, decay: float) -> None:
        """Fade, then add values that are ``total`` together and count for ``weight``. Mutates."""
        self.total = self.total * decay + total
        self.weight = self.weight * decay + weight


NO_SCORE = Score()
"""Of requests and draft widths that nothing is known of; nobody adds to it."""


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
        self._usual_common = DecayedMean()
        self._brier = DecayedMean()
        self._odds: dict[str, FloatArray] = {}
        self._memory_odds: list[float] = []
        self._num_steps = self._refresh_step = 0

    @property
    def num_requests(self) -> int:
        """Requests that something is known of."""
        return len(self._requests)

    @property
    def brier_score(self) -> float:
        """Mean squared error of predicted hazards over recent trials; NaN before the first."""
        return self._brier.value

    def survival(self, rows: Sequence[RowState], draft_widths: Sequence[int]) -> FloatArray:
        """Return ``[draft widths, rows, widest - 1]`` probabilities, falling along each row.

        Those behind a draft width's own block are what a wider one would give.
        """
        odds = self._row_odds(rows, self._request_shifts(rows), max(draft_widths))
        shifts = np.array([self._width_shift(width) for width in draft_widths])
        odds = odds * np.exp(shifts)[:, None, None]
        hazards: FloatArray = odds / (1.0 + odds)
        # In place; np.cumprod takes three times as long.
        for position in range(1, hazards.shape[2]):
            hazards[:, :, position] *= hazards[:, :, position - 1]
        return hazards

    def class_survival(self, traffic: str, draft_width: int) -> FloatArray:
        """Return ``[draft_width - 1]`` probabilities of a request of a class that nothing is known of."""
        shift = math.exp(self._width_shift(draft_width))
        odds = self._class_odds(traffic)[: draft_width - 1] * shift
        survival: FloatArray = np.cumprod(odds / (1.0 + odds), dtype=np.float64)
        return survival

    def observe(self, outcomes: Sequence[RowOutcome], num_steps: int = 1) -> float:
        """Learn from rows that drafted. Mutates.

        Args:
            outcomes: of one step, or of a few that followed one another.
            num_steps: how many.

        Returns:
            accepted draft tokens beyond what was expected of these trials, in standard deviations; 0 without
            any.
        """
        by_width: dict[int, list[RowOutcome]] = {}
        for outcome in outcomes:
            if outcome.draft_width > 1:
                by_width.setdefault(outcome.draft_width, []).append(outcome)
        self._num_steps += num_steps
        surprise = 0.0
        for width, mine in by_width.items():
            surprise += self._learn(width, mine, num_steps)
        return surprise / math.sqrt(max(1, len(by_width)))

    def forget(self, seq_id: int) -> None:
        """Drop what is known of a request that has ended. Mutates."""
        self._requests.pop(seq_id, None)

    def _request_shifts(self, rows: Sequence[RowState] | Sequence[RowOutcome]) -> FloatArray:
        return np.array([self._requests.get(row.seq_id, NO_SCORE).shift for row in rows])

    def _row_odds(
        self,
        rows: Sequence[RowState] | Sequence[RowOutcome],
        shifts: FloatArray,
        draft_width: int,
    ) -> FloatArray:
        """Odds ``[rows, draft_width - 1]`` of rows with these shifts, by a draft width of no effect."""
        classes = {row.traffic: 0 for row in rows}
        odds = np.stack([self._class_odds(traffic)[: draft_width - 1] for traffic in classes])
        if len(classes) > 1:
            classes = {traffic: index for index, traffic in enumerate(classes)}
            odds = odds[[classes[row.traffic] for row in rows]]
        return odds * np.exp(shifts)[:, None]

    def _row_hazards(
        self, rows: Sequence[RowOutcome], shifts: FloatArray, draft_width: int
    ) -> FloatArray:
        """Hazards ``[rows, draft_width - 1]`` of rows with these shifts at a draft width."""
        odds = self._row_odds(rows, shifts, draft_width) * math.exp(self._width_shift(draft_width))
        return odds / (1.0 + odds)

    def _class_odds(self, traffic: str) -> FloatArray:
        """Odds of each draft token of a class, at a draft width of no particular effect."""
        if traffic not in self._odds:
            settings = self._settings
            weight, smooth = settings.shrink_trials, settings.smooth_trials
            log_odds = self._recent.log_odds(self._remembered(), weight, smooth)
            if traffic in self._classes:
                log_odds = self._classes[traffic].log_odds(log_odds, weight, smooth)
            self._odds[traffic] = np.exp(log_odds)
        return self._odds[traffic]

    def _remembered(self) -> list[float]:
        """The memory's log-odds; computed now and then, for they hardly move in a few steps."""
        if self._num_steps >= self._refresh_step:
            settings = self._settings
            prior = settings.prior_hazard
            prior_odds = [math.log(prior / (1.0 - prior))] * self.num_positions
            weight, smooth = settings.prior_trials, settings.smooth_trials
            self._memory_odds = self._memory.log_odds(prior_odds, weight, smooth)
            # As often as the memory grows by a quarter, and every so many steps.
            self._refresh_step = self._num_steps + min(REFRESH_STEPS, 1 + self._num_steps // 4)
        return self._memory_odds

    def _width_shift(self, draft_width: int) -> float:
        return self._widths.get(draft_width, NO_SCORE).shift

    def _learn(self, width: int, rows: list[RowOutcome], num_steps: int) -> float:
        """Learn from rows of one draft width; return the surprise in standard deviations. Mutates."""
        settings = self._settings
        position = np.arange(1, width)
        is_trial = position <= np.array([row.num_trials for row in rows])[:, None]
        is_hit = position <= np.array([row.num_accepted for row in rows])[:, None]
        shifts = self._request_shifts(rows)
        expected = self._row_hazards(rows, shifts, width)
        beyond = (is_hit - expected) * is_trial
        self._score_predictions(beyond, is_trial)
        information = _expected_information(expected, rows)
        own_doubt = self._request_doubts(rows)
        spread = math.sqrt(float(np.sum(information * (1.0 + information * own_doubt))))
        surprise = float(beyond.sum()) / spread if spread else 0.0
        # What the requests have in common is no merit of theirs, the more of them the surer.
        common = float(shifts.sum()) / (len(rows) + settings.crowd)
        self._usual_common.add(common, 1.0, settings.common_decay**num_steps)
        common -= self._usual_common.value
        by_traffic = (is_hit - self._row_hazards(rows, shifts - common, width)) * is_trial
        is_surprised = max(abs(surprise), abs(self._drift(rows))) > settings.surprise
        self._count(rows, is_trial, by_traffic, num_steps, is_surprised)
        # Shifts get what the counts have not taken.
        left = (is_hit - self._row_hazards(rows, shifts, width)) * is_trial
        excess = left.sum(axis=1)
        self._score_width(width, excess, information, own_doubt)
        self._score_requests(rows, excess, information)
        return surprise

    def _drift(self, rows: list[RowOutcome]) -> float:
        """By how many standard deviations these requests together, over all their cycles, differ from what
        requests usually have in common.

        A drafter that has lost its touch surprises little in any one step, and in every step.
        """
        scores = [self._requests.get(row.seq_id, NO_SCORE) for row in rows]
        excess = sum(score.excess for score in scores)
        known = np.array([score.information for score in scores])
        prior = self._settings.request_prior
        usual = self._usual_common.value * (1.0 + self._settings.crowd / len(rows))
        variance = float(np.sum(known + known**2 / prior))
        beyond = excess - usual * float(np.sum(known + prior))
        return beyond / math.sqrt(variance) if variance else 0.0

    def _request_doubts(self, rows: list[RowOutcome]) -> FloatArray:
        """Variances ``[rows]`` of the requests' shifts, in squared log-odds."""
        known = [self._requests.get(row.seq_id, NO_SCORE).information for row in rows]
        return 1.0 / (np.array(known) + self._settings.request_prior)

    def _score_requests(
        self, rows: list[RowOutcome], excess: FloatArray, information: FloatArray
    ) -> None:
        settings = self._settings
        for row, more, known in zip(rows, excess.tolist(), information.tolist(), strict=True):
            score = self._requests.setdefault(row.seq_id, Score())
            score.add(more, known, settings.request_decay, settings.request_prior)

    def _score_width(
        self,
        width: int,
        excess: FloatArray,
        information: FloatArray,
        own_doubt: FloatArray,
    ) -> None:
        """Move a draft width's shift, less by requests that may explain as much themselves. Mutates."""
        settings = self._settings
        # A share may not depend on how many trials came of the cycle: it would favour short ones.
        shares = 1.0 / (1.0 + own_doubt)
        told = float(information @ shares)
        decay = settings.width_decay ** (told / settings.width_unit)
        score = self._widths.setdefault(width, Score())
        score.add(float(excess @ shares), told, decay, settings.width_prior)

    def _count(
        self,
        rows: list[RowOutcome],
        is_trial: np.ndarray,
        beyond: FloatArray,
        num_steps: int,
        is_surprised: bool,
    ) -> None:
        """Count trials and successes, the shifts' effects taken out. Mutates."""
        settings = self._settings
        decay = settings.surprised_decay if is_surprised else settings.recent_decay**num_steps
        by_class: dict[str, list[int]] = {}
        for index, row in enumerate(rows):
            by_class.setdefault(row.traffic, []).append(index)
        total = np.zeros((2, self.num_positions))
        for traffic, indices in by_class.items():
            trials, more = is_trial[indices].sum(axis=0), beyond[indices].sum(axis=0)
            num = len(trials)
            odds = self._class_odds(traffic)[:num]
            hits = trials * (odds / (1.0 + odds)) + more
            counts = np.zeros((2, self.num_positions))
            counts[0, :num], counts[1, :num] = trials, hits
            total += counts
            of_class = self._classes.setdefault(traffic, HazardCounts(self.num_positions))
            of_class.add(counts[0], counts[1], decay)
        self._memory.add(total[0], total[1], settings.memory_decay**num_steps)
        self._recent.add(total[0], total[1], decay)
        self._odds.clear()

    def _score_predictions(self, beyond: FloatArray, is_trial: np.ndarray) -> None:
        total, weight = float(np.sum(beyond**2)), float(np.sum(is_trial))
        self._brier.add(total, weight, self._settings.brier_decay)


def _expected_information(hazards: FloatArray, rows: Sequence[RowOutcome]) -> FloatArray:
    """Fisher information ``[rows]`` on a shift that a cycle was going to give, given hazards
    ``[rows, draft_width - 1]``.

    Not what it gave: a cycle that accepts much has more trials, so what it says for a request would count
    for less than what another says against one, and all shifts would be too low.
    """
    reached = np.ones_like(hazards)
    np.cumprod(hazards[:, :-1], axis=1, out=reached[:, 1:])
    verified = np.array([row.width or row.draft_width for row in rows])
    is_verified = np.arange(1, hazards.shape[1] + 1) < verified[:, None]
    information: FloatArray = (hazards * (1.0 - hazards) * reached * is_verified).sum(axis=1)
    return information
