"""Allocation: prefixes of drafts, the best of all sizes, bounds kept."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.coordinator.block_scheduler.allocation import (
    Price,
    allocate,
    candidate_sizes,
    floors_for,
)
from gateway.coordinator.block_scheduler.records import FloatArray, IntArray

NO_SIZES = np.array([], dtype=np.int64)


def falling(hazards: list[list[float]]) -> FloatArray:
    return np.cumprod(np.array(hazards), axis=1)


def affine(base: float, slope: float) -> Price:
    return lambda positions: base + slope * positions


def best_by_trying_all(
    survival: FloatArray, max_widths: list[int], base: float, slope: float
) -> float:
    draft_width = survival.shape[1] + 1
    values = []
    for widths in product(*(range(1, min(draft_width, most) + 1) for most in max_widths)):
        tokens = sum(1 + survival[i, : w - 1].sum() for i, w in enumerate(widths))
        values.append(tokens / (base + slope * sum(widths)))
    return float(max(values))


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.floats(0.02, 0.98), min_size=3, max_size=3), min_size=1, max_size=4),
    st.data(),
)
def test_no_choice_of_widths_is_better(hazards: list[list[float]], data: st.DataObject) -> None:
    survival = falling(hazards)
    most = data.draw(st.lists(st.integers(1, 4), min_size=len(hazards), max_size=len(hazards)))
    base, slope = data.draw(st.floats(0.1, 20)), data.draw(st.floats(0.01, 3))
    sizes = candidate_sizes(len(most), 4 * len(most), NO_SIZES)
    chosen = allocate(4, survival, np.array(most), sizes, affine(base, slope))
    assert chosen.tokens_per_ms == pytest.approx(best_by_trying_all(survival, most, base, slope))
    tokens = sum(1 + survival[i, : w - 1].sum() for i, w in enumerate(chosen.widths))
    assert chosen.tokens == pytest.approx(tokens)
    assert np.all(chosen.widths >= 1) and np.all(chosen.widths <= most)


def test_a_staircase_is_searched_beyond_its_first_fall() -> None:
    """Going from 1 to 2 positions loses, going to 8 wins: a scan that stops at the first loss finds 1."""

    def staircase(positions: IntArray) -> FloatArray:
        return np.where(positions <= 1, 1.0, 2.6)

    survival = falling([[0.9] * 7])
    chosen = allocate(8, survival, np.array([8]), candidate_sizes(1, 8, NO_SIZES), staircase)
    assert chosen.widths.tolist() == [8]


def test_sizes_are_the_captured_ones_less_what_is_fixed() -> None:
    captured = np.array([4, 8, 16, 32, 64])
    assert candidate_sizes(3, 24, captured).tolist() == [3, 4, 8, 16, 24]
    assert candidate_sizes(3, 24, captured, fixed_positions=6).tolist() == [3, 10, 24]
    assert candidate_sizes(3, 3, captured).tolist() == [3]


def test_many_rows_are_priced_at_a_few_dozen_sizes() -> None:
    sizes = candidate_sizes(256, 4096, NO_SIZES)
    assert 30 < len(sizes) <= 48
    assert sizes[0] == 256 and sizes[-1] == 4096


def test_likely_rows_get_the_positions() -> None:
    survival = falling([[0.95] * 7, [0.2] * 7])
    chosen = allocate(
        8, survival, np.array([8, 8]), candidate_sizes(2, 16, NO_SIZES), affine(1, 0.5)
    )
    assert chosen.widths[0] > chosen.widths[1]


def test_plain_decoding_has_one_size() -> None:
    chosen = allocate(
        1, np.empty((3, 0)), np.array([5, 1, 9]), candidate_sizes(3, 3, NO_SIZES), affine(1, 1)
    )
    assert chosen.widths.tolist() == [1, 1, 1]
    assert (chosen.tokens, chosen.step_ms) == (3.0, 4.0)


def test_floors_are_given_first_and_never_beyond_the_maximum() -> None:
    survival = falling([[0.3] * 7, [0.1] * 7])
    chosen = allocate(
        8,
        survival,
        np.array([8, 3]),
        candidate_sizes(2, 16, NO_SIZES),
        affine(0.1, 10.0),
        np.array([1, 5]),
    )
    assert chosen.widths.tolist() == [1, 3]


def test_a_target_is_met_by_the_least_width_or_given_up() -> None:
    survival = falling([[0.9] * 7, [0.05] * 7])
    floors = floors_for(survival, step_ms=20.0, target_tpot_ms=8.0)
    assert 20.0 / (1 + survival[0, : floors[0] - 1].sum()) <= 8.0
    assert 20.0 / (1 + survival[0, : floors[0] - 2].sum()) > 8.0
    assert floors[1] == 1
