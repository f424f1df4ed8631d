from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.step_cost_chart import draw, main

REPORT = Path(__file__).resolve().parents[3] / "docs" / "step-cost.json"


def test_the_picture_shows_what_the_report_says() -> None:
    report = json.loads(REPORT.read_text(encoding="utf-8"))
    panels = {axes.get_title(): axes for axes in draw(report).axes}
    assert set(panels) == {"Rows", "Width", "Context", "Positions verified together"}
    eight = next(line for line in panels["Rows"].lines if line.get_label() == "width 8")
    shown = dict(eight.get_xydata().tolist())
    cells = {
        (c["cell"]["num_rows"], *c["cell"]["widths"], c["cell"]["context"]): c
        for c in report["cells"]
    }
    assert shown[4] == cells[4, 8, 256]["step_ms"]


def test_the_picture_goes_beside_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "costs.json"
    report.write_bytes(REPORT.read_bytes())
    monkeypatch.setattr("sys.argv", ["chart", str(report)])
    main()
    assert "<svg" in (tmp_path / "costs.svg").read_text(encoding="utf-8")
