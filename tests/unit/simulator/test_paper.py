"""The paper's published numbers come out of its calibration."""

from __future__ import annotations

import pytest

from loadtest.simulator.matrix import Effort
from loadtest.simulator.paper import (
    PAPER_MATH,
    PUBLISHED_LENGTHS,
    PUBLISHED_SPEEDUPS,
    run_paper,
)

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("width", "length"), PUBLISHED_LENGTHS.items())
def test_the_curve_has_the_published_acceptance_lengths(width: int, length: float) -> None:
    assert PAPER_MATH.acceptance_length(width) == pytest.approx(length, rel=0.003)


def test_the_published_speedups_come_out() -> None:
    rows = run_paper([], PUBLISHED_SPEEDUPS, Effort(400))
    for row in rows:
        published = PUBLISHED_SPEEDUPS[row.num_streams]
        assert row.speedups["static:16"] == pytest.approx(published, rel=0.03)
    for width, length in PUBLISHED_LENGTHS.items():
        # Ends of outputs cut their last block, so it is a little less.
        assert length * 0.97 < rows[-1].acceptance_lengths[width] < length
