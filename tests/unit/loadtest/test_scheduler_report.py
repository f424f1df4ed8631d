"""The regret matrix: shares, intervals, bars."""

from __future__ import annotations

import json

import pytest

from loadtest.closed_loop import Answer, Cell
from loadtest.scheduler_report import (
    bars,
    best_elsewhere,
    evaluate,
    policy_means,
    render,
    share,
    to_json,
)


def cell(policy: str, streams: int, rate: float) -> Cell:
    """A window of one second with one answer of ``rate`` tokens, all in its first chunk."""
    return Cell(policy, streams, 0.0, 1.0, (Answer(0.0, 0.5, 0.5, int(rate), int(rate), 1, 1),))


def windows(adaptive: float, streams: int = 8) -> list[Cell]:
    rates = {"off": 100, "static:4": 200, "static:8": 150, "adaptive": adaptive}
    return [cell(p, streams, rate * (1 + n / 10)) for n in range(4) for p, rate in rates.items()]


def test_the_matrix_compares_with_the_best_width_of_each_cell() -> None:
    matrix = evaluate({"code": windows(190), "chat": windows(204)})
    code, chat = matrix
    assert (code.traffic, code.num_streams, code.best_static) == ("code", 8, "static:4")
    assert code.of_best.value == pytest.approx(0.95, abs=0.01)
    assert code.of_plain.value == pytest.approx(1.9, abs=0.01)
    assert chat.of_best.value > 1
    # Every repeat was faster than the one before, for all policies alike: no uncertainty of the ratio.
    assert code.of_best.high - code.of_best.low < 0.02


def test_plain_decoding_may_be_the_best_width() -> None:
    mine = [cell(p, 1, rate) for p, rate in (("off", 300), ("static:4", 200), ("adaptive", 290))]
    (only,) = evaluate({"prose": mine})
    assert only.best_static == "off"
    assert only.of_best == only.of_plain


def test_intervals_grow_with_the_spread_of_repeats() -> None:
    steady = share([10, 10, 10, 10], [10, 10, 10, 10])
    assert (steady.low, steady.value, steady.high) == (1, 1, 1)
    wild = share([5, 15, 8, 12], [10, 10, 10, 10])
    assert wild.low < 0.9 < wild.value == 1 < 1.1 < wild.high
    assert wild == share([5, 15, 8, 12], [10, 10, 10, 10])


@pytest.mark.parametrize(("rate", "met"), [(201, [True, True, True]), (180, [False, True, False])])
def test_bars(rate: float, met: list[bool]) -> None:
    matrix = evaluate({"code": windows(rate)})
    assert [is_met for _, _, is_met in bars(matrix)] == met
    assert policy_means(matrix)["static:4"] == pytest.approx(2.0)
    text = render(matrix)
    assert ("MISSED" in text) == (not all(met))
    assert "code" in text and "static:4" in text


def test_the_last_line_is_json() -> None:
    matrix = evaluate({"code": windows(190, 4)})
    record = json.loads(to_json(matrix, {"model": "m"}))
    assert record["cells"][0]["best_static"] == "static:4"
    assert record["cells"][0]["of_best"]["value"] == pytest.approx(0.95, abs=0.01)
    assert [bar["met"] for bar in record["bars"]] == [True, True, False]


def test_the_width_to_compare_with_is_chosen_by_the_other_half() -> None:
    """Two widths that are alike, each lucky in one half: neither luck counts."""
    rates = {"static:4": [12, 12, 8, 8, 12, 12, 8, 8], "static:8": [8, 8, 12, 12, 8, 8, 12, 12]}
    assert best_elsewhere(rates) == [8] * 8
    clear = {"static:4": [12, 11, 12, 11], "static:8": [8, 9, 8, 9]}
    assert best_elsewhere(clear) == clear["static:4"]
    assert best_elsewhere({"a": [1, 2], "b": [2, 3]}) == [2, 3]
    assert best_elsewhere({"a": [1], "b": [2]}) == [2]
