"""Milliseconds of a served step by rows and width, as a start-up sweep measured them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from gateway.coordinator.block_scheduler.records import (
    TREES,
    FloatArray,
    IntArray,
    block_width,
)
from gateway.coordinator.block_scheduler.smoothing import smoothed

CONTEXT_UNIT = 1000.0
"""Context is priced per so many committed tokens."""
MOST_FOR_CONTEXT = 0.95
"""Share of any measured pass that its context may take."""


class CostSample(NamedTuple):
    """One measured step: verify rows that all draft and verify one width, but for ``other_width``."""

    num_rows: int
    width: int
    context: int
    """Committed tokens of all rows."""
    draft_ms: float
    verify_ms: float
    step_ms: float
    """From the landing before to this one's: served time, not kernel time."""
    other_width: int = 0
    """Verified by every other row; 0: all verify ``width``."""
    tree_block: int = 0
    """All rows verify trees of ``width`` positions out of blocks of this width; 0: chains."""

    @property
    def is_plain(self) -> bool:
        """Whether its rows decode plainly, one position each."""
        return self.width == 1 and not self.other_width and not self.tree_block


class Grid:
    """Values at some numbers of rows and some widths, linear in between; immutable.

    Args:
        cells: values by ``(rows, width)``. A width need not be there for every number of rows; beyond its
            last one its values grow in proportion.
        is_monotone: more rows or wider rows never take less; noise says so now and then.
    """

    def __init__(self, cells: dict[tuple[int, int], float], is_monotone: bool) -> None:
        self._rows = sorted({rows for rows, _ in cells})
        self._widths = np.array(sorted({width for _, width in cells}), dtype=np.float64)
        columns = []
        for width in self._widths.tolist():
            having = [rows for rows in self._rows if (rows, int(width)) in cells]
            values = [cells[rows, int(width)] for rows in having]
            # A sweep that ran out of time, or of positions, has no cells of many wide rows.
            grown = np.maximum(1.0, np.array(self._rows) / having[-1])
            columns.append(np.interp(self._rows, having, values) * grown)
        self._values = np.stack(columns, axis=1)  # [rows, widths]
        if is_monotone:
            self._values = _rising(_rising(self._values, axis=0), axis=1)
        self._lines: dict[int, FloatArray] = {}

    def line(self, num_rows: int) -> FloatArray:
        """Values ``[widths]`` at a number of rows; beyond the last one they go on in proportion."""
        if num_rows not in self._lines:
            low = max(0, bisect_right(self._rows, num_rows) - 1)
            high = min(low + 1, len(self._rows) - 1)
            first, last = self._rows[low], self._rows[high]
            share = (num_rows - first) / (last - first) if first < num_rows < last else 0.0
            line = self._values[low] * (1 - share) + self._values[high] * share
            self._lines[num_rows] = line * max(1.0, num_rows / self._rows[-1])
        return self._lines[num_rows]

    def at(self, num_rows: int, widths: FloatArray) -> FloatArray:
        """Values at (fractional) widths; beyond the last one they go on as between the last two."""
        line, known = self.line(num_rows), self._widths
        values: FloatArray = np.interp(widths, known, line)
        if len(known) > 1:
            slope = (line[-1] - line[-2]) / (known[-1] - known[-2])
            values = values + slope * np.maximum(0.0, widths - known[-1])
        return values


class CostTable:
    """Prices of steps; immutable. A step's price is verification, and what its draft width costs besides.

    Args:
        samples: of a sweep; several of one cell give their median,
            with its noise taken out (see ``smoothing``).
        captured_sizes: packed positions that the engine runs, ascending; empty when it runs any. A step is
            priced at the size that it is padded to.

    Raises:
        ValueError: no sample is of plain decoding, which then has no price.
    """

    def __init__(self, samples: Iterable[CostSample], captured_sizes: Sequence[int] = ()) -> None:
        samples = list(samples)
        if not any(sample.is_plain for sample in samples):
            raise ValueError(
                "a cost table needs samples of plain decoding: of chains of width 1, all rows alike"
            )
        self.captured_sizes = tuple(captured_sizes)
        self._sizes = np.array(captured_sizes, dtype=np.int64)
        ragged = [sample for sample in samples if sample.other_width]
        trees = [sample for sample in samples if sample.tree_block]
        samples = [s for s in samples if not s.other_width and not s.tree_block]
        self.ms_per_context = _context_slope(samples)
        verify = smoothed(_by_cell(samples, self._verify_ms), first_width=1)
        rest = smoothed(_by_cell(samples, lambda s: s.step_ms - s.verify_ms), first_width=2)
        self._verify = Grid(verify, is_monotone=True)
        self._rest = Grid(rest, is_monotone=False)
        tree_rest = self._tree_rest(trees)
        self._trees = Grid(tree_rest, is_monotone=False) if tree_rest else None
        self._tree_widths = {width for _, width in tree_rest}
        self.raggedness = self._raggedness(ragged)
        """How far a step of rows that differ costs as if all were as wide as the widest: 0 to 1."""

    def step_ms(
        self, draft_widths: Sequence[int], num_rows: int, positions: IntArray, context: int
    ) -> FloatArray:
        """Price steps ``[draft widths, sizes]``.

        Args:
            draft_widths: of all rows of a step; 1 when nobody drafts.
            num_rows: verify rows, at least one.
            positions: ``[sizes]`` verified positions of all rows together.
            context: committed tokens of all rows.
        """
        widths = np.array([block_width(width) for width in draft_widths], dtype=np.float64)
        rest = self._rest.at(num_rows, widths)
        if self._trees is not None:
            # Trees that were not measured cost as much as chains out of such blocks.
            for index, width in enumerate(draft_widths):
                if width in self._tree_widths:
                    rest[index] = self._trees.at(num_rows, np.array([float(width)]))[0]
        # Beside verification, wider blocks may seem to take less; they do not give time back.
        rest = np.maximum(0.0, rest)
        even = self.padded(positions) / num_rows
        # Whatever is verified of a block, some row has nearly all of it.
        as_wide = even + self.raggedness * np.maximum(0.0, widths[:, None] - even)
        verify = self._verify.at(num_rows, as_wide)
        return rest[:, None] + verify + self.ms_per_context * context / CONTEXT_UNIT

    def padded(self, positions: IntArray) -> IntArray:
        """The captured sizes that hold ``positions``; above the largest, the positions themselves."""
        sizes = self._sizes
        if not len(sizes):
            return positions
        index = np.searchsorted(sizes, positions)
        fitting = sizes[np.minimum(index, len(sizes) - 1)]
        return np.where(index < len(sizes), fitting, positions)

    def _raggedness(self, samples: Sequence[CostSample]) -> float:
        shares = []
        for (rows, width), mine in _by_cell(samples, self._verify_ms).items():
            other = next(s.other_width for s in samples if (s.num_rows, s.width) == (rows, width))
            even, widest = self._verify.at(rows, np.array([(width + other) / 2, width])).tolist()
            if widest > even:
                shares.append((median(mine) - even) / (widest - even))
        return min(1.0, max(0.0, median(shares))) if shares else 0.0

    def _tree_rest(self, samples: Sequence[CostSample]) -> dict[tuple[int, int], float]:
        """What steps of trees take beside the verification of as many positions of chains.

        They take longer to draft, and to verify.
        """
        cells: dict[tuple[int, int], list[float]] = {}
        for sample in samples:
            verify = float(self._verify.at(sample.num_rows, np.array([float(sample.width)]))[0])
            context_ms = self.ms_per_context * sample.context / CONTEXT_UNIT
            cell = (sample.num_rows, TREES + sample.tree_block)
            cells.setdefault(cell, []).append(sample.step_ms - verify - context_ms)
        return {cell: max(0.0, median(mine)) for cell, mine in cells.items()}

    def _verify_ms(self, sample: CostSample) -> float:
        return sample.verify_ms - self.ms_per_context * sample.context / CONTEXT_UNIT


def _rising(values: FloatArray, axis: int) -> FloatArray:
    """Make values rise along an axis, midway between the largest before and the smallest behind.

    The largest before alone would hand a value that noise made too high on to all that follow.
    """
    least = np.maximum.accumulate(values, axis)
    most = np.flip(np.minimum.accumulate(np.flip(values, axis), axis), axis)
    rising: FloatArray = (least + most) / 2
    return rising


def _by_cell(
    samples: Sequence[CostSample], value: Callable[[CostSample], float]
) -> dict[tuple[int, int], list[float]]:
    values: dict[tuple[int, int], list[float]] = {}
    for sample in samples:
        values.setdefault((sample.num_rows, sample.width), []).append(value(sample))
    return values


def _context_slope(samples: list[CostSample]) -> float:
    """Milliseconds of verification per 1,000 tokens of context: from cells measured at several contexts."""
    cells: dict[tuple[int, int], list[CostSample]] = {}
    for sample in samples:
        cells.setdefault((sample.num_rows, sample.width), []).append(sample)
    slopes = []
    for mine in cells.values():
        least, most = min(s.context for s in mine), max(s.context for s in mine)
        if most > least:
            low = median(s.verify_ms for s in mine if s.context == least)
            high = median(s.verify_ms for s in mine if s.context == most)
            slopes.append((high - low) / (most - least) * CONTEXT_UNIT)
    if not slopes:
        return 0.0
    # On a busy machine noise can be more than contexts are; a pass without any still takes time.
    limit = min(MOST_FOR_CONTEXT * s.verify_ms / s.context for s in samples if s.context)
    return min(limit * CONTEXT_UNIT, max(0.0, median(slopes)))
