"""What the next step will take: the sweep's table, corrected by every step that lands.

A correction is a ratio of observed to predicted time. It has two parts, for machines slow down and recover by
tens of per cent within seconds, and that says nothing about widths:
- the *level* of a load (power of two of rows, steps in flight) follows every step quickly;
- the *contrast* of a draft width at a load learns only from steps right after a change of the width, when
  the level was that of another width just before: not from the first steps of a load that has come back, nor
  from steps whose width nobody asked for, of which not every one is seen.
So widths are compared at the same moment, and one that has not been visited for a while keeps its place. A
load that nobody has visited takes the level of the last steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gateway.coordinator.block_scheduler.cost_table import CostTable
from gateway.coordinator.block_scheduler.records import FloatArray, IntArray, StepOutcome, load_of


@dataclass(frozen=True, slots=True)
class CostSettings:
    """How fast corrections follow, and what is an outlier."""

    level_rate: float = 0.1
    """Weight of a new step in a level; while that has seen fewer than the inverse, all weigh alike."""
    contrast_rate: float = 0.03
    contrast_prior: float = 12.0
    """Steps that no contrast at all counts as: one step is off by a quarter, and the sweep knows better."""
    fresh_steps: int = 4
    """Steps after a change of the draft width that speak of the width, ever less, and then of the level."""
    most_deviation: float = 1.5
    """An observation counts as this multiple of what was expected at most, and as its inverse at least."""


class Ratio:
    """A running mean of logarithms. Owner: the cost model."""

    def __init__(self, log: float = 0.0) -> None:
        self.log = log
        self.num_steps = 0

    def add(self, surprise: float, least_rate: float, prior_steps: float = 0.0) -> None:
        """Move by a share of what the observation is more than expected. Mutates."""
        self.num_steps += 1
        self.log += max(least_rate, 1 / (self.num_steps + prior_steps)) * surprise


class LoadCorrections:
    """Corrections at one load. Owner: the cost model."""

    def __init__(self, level: float) -> None:
        self.level = Ratio(level)
        self.contrasts: dict[int, Ratio] = {}
        """By draft width."""
        self._draft_width = self._age = 0

    def log_ratio(self, draft_width: int) -> float:
        """Logarithm of the correction."""
        contrast = self.contrasts.get(draft_width)
        return self.level.log + (contrast.log if contrast else 0.0)

    def correct(
        self, draft_width: int, surprise: float, follows: bool, settings: CostSettings
    ) -> None:
        """Share a step's surprise between contrast and level. Mutates.

        Args:
            draft_width: of the step.
            surprise: logarithm of observed over predicted time.
            follows: the step before was of this load too.
        """
        if not follows:
            self._age = settings.fresh_steps
        elif draft_width != self._draft_width:
            self._age = 0
        self._draft_width = draft_width
        freshness = max(0.0, 1.0 - self._age / settings.fresh_steps)
        self._age += 1
        if freshness:
            contrast = self.contrasts.setdefault(draft_width, Ratio())
            contrast.add(freshness * surprise, settings.contrast_rate, settings.contrast_prior)
        self.level.add((1.0 - freshness) * surprise, settings.level_rate)


class StepCostModel:
    """Predicts the time from one landing to the next.

    Owner: the block scheduler; ``observe`` mutates.

    Args:
        table: of the sweep.
        settings: rates.
    """

    def __init__(self, table: CostTable, settings: CostSettings | None = None) -> None:
        self.table = table
        self._settings = settings or CostSettings()
        self._loads: dict[tuple[int, int], LoadCorrections] = {}
        self._last_level = 0.0
        self._last_load: tuple[int, int] | None = None
        self._ms_per_prefill = Ratio()

    def step_ms(
        self,
        draft_widths: Sequence[int],
        num_rows: int,
        positions: IntArray,
        context: int,
        num_prefill_positions: int = 0,
        num_cohorts: int = 1,
    ) -> FloatArray:
        """Predict steps that differ in their draft width and in how many positions they verify.

        Args:
            draft_widths: of all rows of a step; 1 when nobody drafts.
            num_rows: verify rows.
            positions: ``[sizes]`` verified positions.
            context: committed tokens of all rows.
            num_prefill_positions: of the same step.
            num_cohorts: steps in flight.

        Returns:
            ``[draft widths, sizes]`` milliseconds from the landing before to this step's.
        """
        table_ms = self.table.step_ms(draft_widths, num_rows, positions, context)
        load = self._loads.get((load_of(num_rows), num_cohorts)) or LoadCorrections(
            self._last_level
        )
        factors = np.exp([load.log_ratio(width) for width in draft_widths])
        return table_ms * factors[:, None] + self._prefill_ms(num_prefill_positions)

    def observe(self, outcome: StepOutcome) -> float | None:
        """Learn from one step with a time. Mutates.

        Returns:
            observed / predicted time, None when the step says nothing.
        """
        if outcome.step_ms is None or outcome.step_ms <= 0.0 or outcome.num_rows == 0:
            self._last_load = None
            return None
        verified = outcome.num_positions - outcome.num_prefill_positions
        without_prefill = float(
            self.step_ms(
                [outcome.draft_width],
                outcome.num_rows,
                np.array([verified]),
                outcome.context,
                0,
                outcome.num_cohorts,
            )[0, 0]
        )
        if outcome.num_prefill_positions:
            extra_ms = max(0.01, outcome.step_ms - without_prefill)
            per_position = math.log(extra_ms / outcome.num_prefill_positions)
            prefill = self._ms_per_prefill
            prefill.add(per_position - prefill.log, self._settings.level_rate)
            return None
        ratio = outcome.step_ms / without_prefill
        most = math.log(self._settings.most_deviation)
        surprise = min(most, max(-most, math.log(ratio)))
        key = load_of(outcome.num_rows), outcome.num_cohorts
        load = self._loads.setdefault(key, LoadCorrections(self._last_level))
        load.correct(outcome.draft_width, surprise, key == self._last_load, self._settings)
        self._last_load = None if outcome.decision is None else key
        self._last_level = load.level.log
        return ratio

    def _prefill_ms(self, num_positions: int) -> float:
        if not num_positions:
            return 0.0
        return (
            num_positions * math.exp(self._ms_per_prefill.log)
            if self._ms_per_prefill.num_steps
            else 0.0
        )
