"""Decisions are quick; the factor is for a busy machine."""

from __future__ import annotations

import pytest

from loadtest.simulator.decision_time import BARS_MS, measure

pytestmark = pytest.mark.unit
BUSY = 5.0


@pytest.mark.parametrize("num_rows", [1, 32, 256])
def test_deciding_takes_little(num_rows: int) -> None:
    assert measure(num_rows, num_steps=60).median_ms < BUSY * BARS_MS[num_rows]
