"""Noise of repeats is taken out of a table of times, and what is not noise stays."""

from __future__ import annotations

import numpy as np
import pytest

from gateway.coordinator.block_scheduler.smoothing import smoothed

CELLS = [(rows, width) for rows in (1, 2, 4, 8, 16, 32, 64) for width in (1, 2, 4, 6, 8, 12, 16)]


def true_ms(rows: int, width: int) -> float:
    return float((5.0**3 + (0.05 * rows * width) ** 3) ** (1 / 3))


def error(found: dict[tuple[int, int], float]) -> float:
    return float(np.sqrt(np.mean([np.log(found[cell] / true_ms(*cell)) ** 2 for cell in CELLS])))


@pytest.mark.parametrize("seed", range(3))
def test_noise_is_taken_out(seed: int) -> None:
    rng = np.random.default_rng(seed)
    samples = {cell: (true_ms(*cell) * rng.lognormal(0, 0.08, 4)).tolist() for cell in CELLS}
    medians = {cell: float(np.median(mine)) for cell, mine in samples.items()}
    assert error(smoothed(samples, first_width=1)) < 0.9 * error(medians)


def test_stairs_that_are_measured_exactly_stay() -> None:
    stairs = {cell: 4.0 + -(-cell[0] * cell[1] // 16) for cell in CELLS}
    rng = np.random.default_rng(0)
    samples = {cell: (ms * rng.lognormal(0, 0.001, 5)).tolist() for cell, ms in stairs.items()}
    found = smoothed(samples, first_width=1)
    assert max(abs(found[cell] / stairs[cell] - 1) for cell in CELLS) < 0.01


def test_a_table_without_repeats_is_taken_as_it_is() -> None:
    samples = {cell: [float(i % 3 + 1)] for i, cell in enumerate(CELLS)}
    assert smoothed(samples, first_width=2) == {cell: mine[0] for cell, mine in samples.items()}


def test_narrower_widths_than_the_first_are_not_bent_to_the_rest() -> None:
    """Steps that draft cost more than plain ones by a jump, not by a slope."""
    rng = np.random.default_rng(1)
    samples = {
        cell: ((0.5 if cell[1] == 1 else 5.0) * rng.lognormal(0, 0.05, 4)).tolist()
        for cell in CELLS
    }
    found = smoothed(samples, first_width=2)
    assert all(found[rows, 1] == pytest.approx(0.5, rel=0.15) for rows, _ in CELLS)
