"""Allocation: prefixes of drafts, the best of all sizes, bounds kept."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.coordinator.block_scheduler.allocation import (
    Drafts,
    Option,
    candidate_sizes,
    floors_for,
)
from gateway.coordinator.block_scheduler.records import FloatArray, IntArray

Price = Callable[[IntArray], FloatArray]
"""Positions -> milliseconds of a step that verifies so many, ``[n]`` -> ``[n]``."""


def best_widths(
    draft_width: int,
    survival: FloatArray,
    max_widths: list[int],
    price: Price,
) -> tuple[Option, list[int]]:
    """The best step with a draft width or without drafts, ``survival [rows, draft_width - 1]``."""
    num_rows = len(max_widths)
    sizes = candidate_sizes(num_rows, num_rows * draft_width)
    drafts = Drafts([1, draft_width], np.stack([survival] * 2), np.array(max_widths))
    options = drafts.options(sizes, np.stack([price(sizes)] * 2))
    option = max(options.values(), key=lambda option: option.tokens_per_ms)
    return option, drafts.widths(option).tolist()


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
    chosen, widths = best_widths(4, survival, most, affine(base, slope))
    assert chosen.tokens_per_ms == pytest.approx(best_by_trying_all(survival, most, base, slope))
    tokens = sum(1 + survival[i, : w - 1].sum() for i, w in enumerate(widths))
    assert chosen.tokens == pytest.approx(tokens)
    assert chosen.num_positions == sum(widths)
    assert all(1 <= width <= limit for width, limit in zip(widths, most, strict=True))


def test_a_staircase_is_searched_beyond_its_first_fall() -> None:
    """Going from 1 to 2 positions loses, going to 8 wins: a scan that stops at the first loss finds 1."""

    def staircase(positions: IntArray) -> FloatArray:
        return np.where(positions <= 1, 1.0, 2.6)

    survival = falling([[0.9] * 7])
    assert best_widths(8, survival, [8], staircase)[1] == [8]


def test_sizes_are_the_captured_ones_less_what_is_fixed() -> None:
    captured = (4, 8, 16, 32, 64)
    assert candidate_sizes(3, 24, captured).tolist() == [3, 4, 8, 16, 24]
    assert candidate_sizes(3, 24, captured, fixed_positions=6).tolist() == [3, 10, 24]
    assert candidate_sizes(3, 3, captured).tolist() == [3]


def test_many_rows_are_priced_at_a_few_dozen_sizes() -> None:
    sizes = candidate_sizes(256, 4096)
    assert 30 < len(sizes) <= 48
    assert sizes[0] == 256 and sizes[-1] == 4096


def test_likely_rows_get_the_positions() -> None:
    likely, unlikely = best_widths(8, falling([[0.95] * 7, [0.2] * 7]), [8, 8], affine(1, 0.5))[1]
    assert likely > unlikely


def test_plain_decoding_has_one_size() -> None:
    drafts = Drafts([1, 4], np.full((2, 3, 3), 0.9), np.array([5, 1, 9]))
    sizes = candidate_sizes(3, 12)
    plain = drafts.options(sizes, np.stack([1.0 + sizes] * 2))[1]
    assert plain == Option(1, 3, 3.0, 4.0)
    assert drafts.widths(plain).tolist() == [1, 1, 1]


def test_every_draft_width_is_weighed_with_its_own_survival_and_price() -> None:
    survival = np.stack([falling([[hazard] * 7] * 2) for hazard in (0.5, 0.5, 0.9)])
    sizes = candidate_sizes(2, 16)
    step_ms = np.stack([base + 0.0 * sizes for base in (1.0, 2.0, 4.0)])
    options = Drafts([1, 4, 8], survival, np.array([8, 8])).options(sizes, step_ms)
    assert options[4].tokens == pytest.approx(2 * (1 + 0.5 + 0.25 + 0.125))
    assert options[8].tokens == pytest.approx(2 * sum(0.9**k for k in range(8)))
    assert [options[width].step_ms for width in (1, 4, 8)] == [1.0, 2.0, 4.0]


def test_floors_are_given_first_and_never_beyond_the_maximum() -> None:
    survival = falling([[0.3] * 7, [0.1] * 7])
    free, widths = best_widths(8, survival, [8, 3], affine(0.1, 10.0))
    assert (free.draft_width, widths) == (1, [1, 1])
    drafts = Drafts([8], survival[None], np.array([8, 3]), np.array([[1, 5]]))
    sizes = candidate_sizes(2, 16)
    chosen = drafts.options(sizes, affine(0.1, 10.0)(sizes)[None])[8]
    assert drafts.widths(chosen).tolist() == [1, 3]
    assert chosen.tokens == pytest.approx(2 + 0.1 + 0.01)


def test_a_target_is_met_by_the_least_width_or_given_up() -> None:
    survival = falling([[0.9] * 7, [0.05] * 7])
    (floors,) = floors_for(survival[None], np.array([20.0]), target_tpot_ms=8.0)
    assert 20.0 / (1 + survival[0, : floors[0] - 1].sum()) <= 8.0
    assert 20.0 / (1 + survival[0, : floors[0] - 2].sum()) > 8.0
    assert floors[1] == 1
