"""The command runs every section, prints the bars, and says by its exit status whether they are met."""

from __future__ import annotations

import json

import pytest

from loadtest.simulator.__main__ import main, parse_arguments
from loadtest.simulator.bars import cell_bars, geometric_means
from loadtest.simulator.costs import CPU
from loadtest.simulator.matrix import Cell, CellRate, CellResult
from loadtest.simulator.worlds import TRAFFICS

pytestmark = pytest.mark.unit

QUICK = ["--costs", "cpu", "--traffics", "prose", "--streams", "8", "--tokens", "100"]


def test_a_policy_that_misses_bars_ends_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--policies", "table", "--judged", "table", "--sections", "matrix"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("MISSED  97%") for line in lines)
    found = json.loads(lines[-1])
    assert found["is_simulated"]
    assert found["cells"][0]["policies"]["table"]["tokens_per_s"] > 0
    assert [bar["is_met"] for bar in found["bars"]].count(False) >= 2


def test_without_a_judged_policy_there_are_no_bars(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--policies", "smartspec", "--sections", "matrix,paper"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["bars"] == []
    assert found["paper"][0]["num_streams"] == 8


@pytest.mark.parametrize("option", [["--costs", "tpu"], ["--streams", "0"], ["--streams", "x"]])
def test_unknown_choices_are_refused(option: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(option)


def result(streams: int, **rates: float) -> CellResult:
    names = {"adaptive": "adaptive", "off": "off", "narrow": "static:4", "wide": "static:16"}
    found = {names[name]: CellRate(rate, rate, 1.0, 1.0, 0.5) for name, rate in rates.items()}
    for width in (2, 6, 8, 12):
        found[f"static:{width}"] = CellRate(1.0, 1.0, 1.0, 1.0, 0.0)
    return CellResult(Cell(CPU, TRAFFICS["code"], streams), found)


def test_bars_compare_with_the_best_of_each_cell_and_the_best_of_all() -> None:
    results = [
        result(1, adaptive=98.0, off=25.0, narrow=50.0, wide=100.0),
        result(64, adaptive=99.0, off=100.0, narrow=80.0, wide=50.0),
    ]
    assert geometric_means(results)["adaptive"] == pytest.approx((98 / 25 * 99 / 100) ** 0.5)
    assert [bar.is_met for bar in cell_bars("adaptive", results)] == [True, True, True, True]
    results[1] = result(64, adaptive=96.0, off=100.0, narrow=80.0, wide=50.0)
    assert [bar.is_met for bar in cell_bars("adaptive", results)] == [False, False, True, True]
