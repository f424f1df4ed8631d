from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.bench_step_cost import (
    CONTEXTS,
    ROWS,
    USUAL_CONTEXT,
    WIDTHS,
    Cell,
    all_cells,
    make_plan,
    measure,
    to_json,
)
from services.yaml_args import read_app_args

ROOT = Path(__file__).resolve().parents[3]


def test_cells_cover_every_axis_once() -> None:
    cells = all_cells()
    assert len(cells) == len(set(cells))
    assert {cell.context for cell in cells} == set(CONTEXTS)
    assert {Cell(r, (w,), USUAL_CONTEXT) for r in ROWS for w in WIDTHS} <= set(cells)
    assert any(len(set(cell.row_widths)) > 2 for cell in cells)


def test_a_plan_is_what_its_cell_says() -> None:
    plan = make_plan(Cell(6, (1, 4, 16), 100), page_size=16)
    assert [row.width for row in plan.rows] == [1, 4, 16, 1, 4, 16]
    assert plan.num_positions == 42
    assert all(row.start_position == 100 for row in plan.rows)
    pages = [page for row in plan.rows for page in row.page_ids]
    assert len(pages) == len(set(pages)), "every row has pages of its own"
    assert all(len(row.page_ids) * 16 >= 100 + row.width for row in plan.rows)
    # Only rows that draft have something to ingest, and it ends where they begin.
    assert [i.start_position + i.num_tokens for i in plan.ingests] == [100] * 4


@pytest.mark.slow
def test_real_engines_are_measured() -> None:
    args = read_app_args(ROOT / "config.yaml")
    costs = measure(args, [Cell(1, (1,), 40), Cell(3, (1, 4), 40)], repeats=2)
    plain, mixed = costs
    assert (plain.draft_ms, mixed.draft_ms > 0) == (0.0, True)
    assert min(plain.verify_ms, mixed.verify_ms) > 0
    cells = json.loads(json.dumps(to_json(args, costs, 2)))["cells"]
    assert cells[1]["cell"] == {"num_rows": 3, "widths": [1, 4], "context": 40}
    assert cells[1]["step_ms"] == pytest.approx(mixed.draft_ms + mixed.verify_ms, abs=1e-3)
