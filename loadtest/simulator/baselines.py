"""What others ship, with the block scheduler's protocol: fixed widths, a batch-size table, single alphas."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from gateway.coordinator.block_scheduler.cost_table import CostSample
from gateway.coordinator.block_scheduler.records import (
    Decision,
    FloatArray,
    RowState,
    StepLoad,
    StepOutcome,
)
from loadtest.simulator.loop import STATIC_WIDTHS


class TableRow(NamedTuple):
    """Up to ``most_rows`` rows run at ``width``."""

    most_rows: float
    width: int


BATCH_TABLE = (
    TableRow(4, 16),
    TableRow(16, 8),
    TableRow(48, 4),
    TableRow(float("inf"), 1),
)
"""The shape that vLLM and TensorRT-LLM configure by hand."""


class UniformPolicy:
    """All rows at one width, cut where a row allows less. Subclasses choose the width.

    Owner: one run. ``decide`` counts decisions; what ``observe`` mutates is the subclass's.
    """

    def __init__(self) -> None:
        self._num_decisions = 0

    def decide(self, rows: Sequence[RowState], load: StepLoad) -> Decision:
        """See ``loop.Policy``."""
        self._num_decisions += 1
        width = self.width(len(rows))
        widths = [min(width, row.max_width) for row in rows]
        draft_width = 1 if max(widths) == 1 else width
        return Decision(self._num_decisions, draft_width, widths, 0.0, 0.0, "uniform", "")

    def observe(self, outcome: StepOutcome) -> None:
        """See ``loop.Policy``; by default nothing is learned."""

    def forget(self, seq_id: int) -> None:
        """See ``loop.Policy``; nothing is known of single sequences."""

    def width(self, num_rows: int) -> int:
        """Return the width for a step of ``num_rows`` rows."""
        raise NotImplementedError


class StaticWidth(UniformPolicy):
    """Always the same width; 1 is plain decoding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def width(self, num_rows: int) -> int:
        """See ``UniformPolicy``."""
        return self._width


class BatchTable(UniformPolicy):
    """A width per number of rows, whatever is accepted."""

    def __init__(self, table: Sequence[TableRow] = BATCH_TABLE) -> None:
        super().__init__()
        self._table = table

    def width(self, num_rows: int) -> int:
        """See ``UniformPolicy``."""
        return next(row.width for row in self._table if num_rows <= row.most_rows)


class RatioEma(UniformPolicy):
    """Takes accepted per drafted tokens as the chance of every token, and prices steps by the sweep's table.

    Known to be wrong: tokens behind the first rejection count as failures, so a wide block looks worse than
    it is; and at width 1 nothing is seen any more.
    """

    def __init__(self, sweep: Sequence[CostSample], rate: float = 0.05) -> None:
        super().__init__()
        self._prices = TablePrices(sweep)
        self._rate = rate
        self._alpha = 0.8

    def width(self, num_rows: int) -> int:
        """See ``UniformPolicy``."""
        return best_width(self._alpha, self._prices.step_ms(num_rows))

    def observe(self, outcome: StepOutcome) -> None:
        """Move the ratio by one step's. Mutates."""
        num_drafted = outcome.num_positions - outcome.num_rows
        if num_drafted:
            ratio = sum(row.num_accepted for row in outcome.rows) / num_drafted
            self._alpha += self._rate * (ratio - self._alpha)


class SmartSpec(UniformPolicy):
    """One alpha from fair trials, a geometric acceptance length, and time affine in tokens and context."""

    def __init__(self, sweep: Sequence[CostSample], decay: float = 0.98) -> None:
        super().__init__()
        self._prices = AffinePrices(sweep)
        self._decay = decay
        self._num_accepted, self._num_trials = 15.0, 20.0

    def width(self, num_rows: int) -> int:
        """See ``UniformPolicy``."""
        alpha = self._num_accepted / self._num_trials
        return best_width(alpha, self._prices.step_ms(num_rows))

    def observe(self, outcome: StepOutcome) -> None:
        """Fade, then add one step's trials. Mutates."""
        num_trials = sum(row.num_trials for row in outcome.rows)
        if num_trials:
            num_accepted = sum(row.num_accepted for row in outcome.rows)
            self._num_accepted = self._num_accepted * self._decay + num_accepted
            self._num_trials = self._num_trials * self._decay + num_trials


def best_width(alpha: float, step_ms: FloatArray) -> int:
    """Return the static width with the most tokens per ms if every draft token had the chance ``alpha``."""
    widths = np.array(STATIC_WIDTHS)
    alpha = min(alpha, 0.999)
    tokens = (1.0 - alpha**widths) / (1.0 - alpha)
    return STATIC_WIDTHS[int(np.argmax(tokens / step_ms))]


class TablePrices:
    """Median step times of a sweep, linear between its numbers of rows. Owner: one policy; keeps prices."""

    def __init__(self, sweep: Sequence[CostSample]) -> None:
        cells: dict[tuple[int, int], list[float]] = {}
        for sample in sweep:
            cells.setdefault((sample.num_rows, sample.width), []).append(sample.step_ms)
        self._rows = sorted({sample.num_rows for sample in sweep})
        self._lines = [
            [median(cells[num_rows, width]) for num_rows in self._rows] for width in STATIC_WIDTHS
        ]
        self._kept: dict[int, FloatArray] = {}

    def step_ms(self, num_rows: int) -> FloatArray:
        """Return a price per static width."""
        if num_rows not in self._kept:
            prices = [np.interp(num_rows, self._rows, line) for line in self._lines]
            self._kept[num_rows] = np.array(prices)
        return self._kept[num_rows]


class AffinePrices:
    """Least squares over a sweep: verifying by positions and context, drafting by drafted positions."""

    def __init__(self, sweep: Sequence[CostSample]) -> None:
        ones = np.ones(len(sweep))
        rows = np.array([sample.num_rows for sample in sweep])
        positions = rows * np.array([sample.width for sample in sweep])
        context = np.array([sample.context for sample in sweep])
        draft_ms = np.array([sample.draft_ms for sample in sweep])
        rest_ms = np.array([sample.step_ms for sample in sweep]) - draft_ms
        is_drafted = draft_ms > 0
        self._context_per_row = float(np.mean(context / rows))
        self._verify = _least_squares(rest_ms, ones, positions, context)
        self._draft = _least_squares(draft_ms[is_drafted], ones[is_drafted], positions[is_drafted])

    def step_ms(self, num_rows: int) -> FloatArray:
        """Return a price per static width."""
        widths = np.array(STATIC_WIDTHS)
        fixed, per_position, per_context = self._verify
        draft_fixed, per_drafted = self._draft
        context = num_rows * self._context_per_row
        verify = fixed + per_position * num_rows * widths + per_context * context
        draft = np.where(widths > 1, draft_fixed + per_drafted * num_rows * widths, 0.0)
        prices: FloatArray = np.maximum(verify + draft, 1e-3)
        return prices


def _least_squares(values: FloatArray, *columns: FloatArray) -> list[float]:
    solution: list[float] = np.linalg.lstsq(np.stack(columns, axis=1), values, rcond=None)[
        0
    ].tolist()
    return solution
