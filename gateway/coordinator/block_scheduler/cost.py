"""What the next step will take: the sweep's table, corrected by every step that lands.

A correction is the ratio of observed to predicted time, kept per cell (power of two of rows, draft width,
steps in flight). A cell that nobody has visited takes the ratio of all cells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gateway.coordinator.block_scheduler.cost_table import CostTable
from gateway.coordinator.block_scheduler.records import FloatArray, IntArray, StepOutcome


@dataclass(frozen=True, slots=True)
class CostSettings:
    """How fast corrections follow, and what is an outlier."""

    rate: float = 0.05
    """Weight of a new step in a cell that has seen ``1 / rate`` of them; before that, all weigh alike."""
    most_deviation: float = 2.0
    """An observation counts as this multiple of what was expected at most, and as its inverse at least."""
    prior_steps: float = 4.0
    """Steps that the ratio of all cells counts as in each cell."""


class Ratio:
    """A running mean of logarithms. Owner: the cost model."""

    def __init__(self) -> None:
        self.log = 0.0
        self.num_steps = 0

    def add(self, log: float, rate: float) -> None:
        """Move towards one observation. Mutates."""
        self.num_steps += 1
        self.log += max(rate, 1 / self.num_steps) * (log - self.log)


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
        self._all = Ratio()
        self._cells: dict[tuple[int, int, int], Ratio] = {}
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
        bucket = num_rows.bit_length()
        factors = np.array([self._factor((bucket, width, num_cohorts)) for width in draft_widths])
        return table_ms * factors[:, None] + self._prefill_ms(num_prefill_positions)

    def observe(self, outcome: StepOutcome) -> float | None:
        """Learn from one step with a time. Mutates.

        Returns:
            observed / predicted time, None when the step says nothing.
        """
        if outcome.step_ms is None or outcome.num_rows == 0:
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
            self._ms_per_prefill.add(per_position, self._settings.rate)
            return None
        ratio = outcome.step_ms / without_prefill
        cell = (outcome.num_rows.bit_length(), outcome.draft_width, outcome.num_cohorts)
        self._correct(cell, ratio)
        return ratio

    def _factor(self, cell: tuple[int, int, int]) -> float:
        """The cell's ratio, shrunk to that of all cells while it has seen few steps."""
        known = self._cells.get(cell)
        if known is None:
            return math.exp(self._all.log)
        prior = self._settings.prior_steps
        steps = min(known.num_steps, 1 / self._settings.rate)
        return math.exp((known.log * steps + self._all.log * prior) / (steps + prior))

    def _correct(self, cell: tuple[int, int, int], ratio: float) -> None:
        most = math.log(self._settings.most_deviation)
        surprise = min(most, max(-most, math.log(ratio)))
        observed = math.log(self._factor(cell)) + surprise
        self._cells.setdefault(cell, Ratio()).add(observed, self._settings.rate)
        self._all.add(observed, self._settings.rate)

    def _prefill_ms(self, num_positions: int) -> float:
        if not num_positions:
            return 0.0
        return (
            num_positions * math.exp(self._ms_per_prefill.log)
            if self._ms_per_prefill.num_steps
            else 0.0
        )
