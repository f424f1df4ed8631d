"""Takes the noise of a few repeats out of a table of times, as far as it is noise.

Times change smoothly with rows and widths, but for stairs where an engine pads. How much of the roughness is
noise, the repeats say: a table is smoothed just so far that it stays as near to what was measured as the
repeats are to each other. Exact measurements stay as they are, stairs included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import log
from statistics import median

import numpy as np

from gateway.coordinator.block_scheduler.records import FloatArray

Cell = tuple[int, int]
"""Rows and width."""

STRENGTHS = tuple(10.0**power for power in np.arange(2.0, -3.1, -0.25))
"""Weights of roughness that are tried, in turn, against the repeats' variance."""
MAD_TO_SD = 1.4826
"""Standard deviation of normal noise whose median absolute deviation is 1."""
MEDIAN_EXCESS = 1.25
"""How much more a median of few repeats scatters than their mean."""


def smoothed(samples: Mapping[Cell, Sequence[float]], first_width: int) -> dict[Cell, float]:
    """Return one time per cell from its repeats.

    Args:
        samples: milliseconds by cell.
        first_width: narrower ones are another kind of step and not expected to lie in line with the rest.
    """
    medians = {cell: median(mine) for cell, mine in samples.items()}
    if min(medians.values(), default=0.0) <= 0:
        return medians
    error = _relative_noise(samples, medians)
    if not error:
        return medians
    cells = sorted(medians)
    measured = np.array([log(medians[cell]) for cell in cells])
    counts = np.array([len(samples[cell]) for cell in cells])
    weights = counts / (MEDIAN_EXCESS * error) ** 2
    bends = np.array(list(_bends(cells, first_width))).reshape(-1, len(cells))
    roughness = bends.T @ bends
    for strength in STRENGTHS:
        # Roughness is priced in units of what the noise of a median gives.
        smooth = np.linalg.solve(
            np.diag(weights) + strength * float(weights.mean()) * roughness, weights * measured
        )
        if float(np.mean(weights * (smooth - measured) ** 2)) <= 1.0:
            return dict(zip(cells, np.exp(smooth).tolist(), strict=True))
    return medians


def _relative_noise(
    samples: Mapping[Cell, Sequence[float]], medians: Mapping[Cell, float]
) -> float:
    """Standard deviation of one repeat's logarithm; 0 when nothing was repeated."""
    apart = [
        abs(log(value / medians[cell]))
        for cell, mine in samples.items()
        if len(mine) > 2 and min(mine) > 0
        for value in mine
    ]
    return MAD_TO_SD * median(apart) if apart else 0.0


def _bends(cells: Sequence[Cell], first_width: int) -> Iterator[FloatArray]:
    """Change of slope at each inner cell of each line of rows or of widths, as a vector over cells."""
    index = {cell: i for i, cell in enumerate(cells)}
    for axis in (0, 1):
        lines: dict[int, list[Cell]] = {}
        for cell in cells:
            if axis == 0 or cell[1] >= first_width:
                lines.setdefault(cell[1 - axis], []).append(cell)
        for line in lines.values():
            for low, mid, high in zip(line, line[1:], line[2:], strict=False):
                before, after = log(mid[axis] / low[axis]), log(high[axis] / mid[axis])
                bend = np.zeros(len(cells))
                bend[index[low]] = 1 / before
                bend[index[mid]] = -1 / before - 1 / after
                bend[index[high]] = 1 / after
                yield bend
