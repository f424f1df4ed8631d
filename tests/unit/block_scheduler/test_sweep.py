"""The start-up sweep: every cell that fits, no step too large, in time, and kept for the next start."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from dflash_wire.ports import EngineLimits
from dflash_wire.records import StepPlan, StepResult
from gateway.coordinator.block_scheduler.cost_file import cost_path, load_samples, save_samples
from gateway.coordinator.block_scheduler.cost_table import CostSample, CostTable
from gateway.coordinator.block_scheduler.records import TREES
from gateway.coordinator.block_scheduler.sweep import (
    NUM_COUNTED,
    NUM_ROUNDS,
    covered,
    is_whole,
    outline,
    sweep,
    sweep_cells,
)

LIMITS = EngineLimits(
    num_pages=512,
    page_size=16,
    max_step_positions=256,
    max_rows=24,
    max_context=2048,
    max_draft_block_size=16,
)
WIDTHS = (1, 4, 8, 16)
SAMPLES = [CostSample(1, 1, 128, 0.0, 2.0, 2.5), CostSample(1, 4, 128, 1.0, 2.5, 4.0)]
MINE = {"device": "a", "widths": [1, 4]}


class TimedRing:
    """Checks plans, and takes as long as their positions."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.now = 0.0
        self.plans: list[StepPlan] = []

    def send(self, plan: StepPlan) -> None:
        if self.plans:
            assert plan.step_id > self.plans[-1].step_id
        assert plan.num_positions <= self.limits.max_step_positions
        assert len(plan.rows) <= self.limits.max_rows
        held = [page for row in plan.rows for page in row.page_ids]
        assert len(set(held)) == len(held)
        assert max(held) < self.limits.num_pages
        read = {plan.feature_base + i for i in range(self.limits.max_step_positions)}
        for ingest in plan.ingests:
            for i in range(ingest.num_tokens):
                assert 0 <= ingest.feature_offset + i < 2 * self.limits.max_step_positions
                assert ingest.feature_offset + i not in read
        self.plans.append(plan)

    def receive(self, step_id: int) -> StepResult:
        plan = self.plans[-1]
        assert plan.step_id == step_id < 0
        self.now += 0.001 * plan.num_positions
        return StepResult(step_id, [], 0.5, float(plan.num_positions))

    def clock(self) -> float:
        return self.now


def test_every_cell_is_measured_and_the_first_step_of_a_visit_is_not_counted() -> None:
    ring = TimedRing(LIMITS)
    samples = sweep(ring, LIMITS, WIDTHS, 1e9, ring.clock)
    cells = sweep_cells(LIMITS, WIDTHS)
    assert len(samples) == NUM_ROUNDS * NUM_COUNTED * len(cells)
    assert {(c.num_rows, c.width) for c in outline(cells)} == {
        (c.num_rows, c.width) for c in cells if c.width in (1, 4, 16)
    }
    assert len(ring.plans) == NUM_ROUNDS * (NUM_COUNTED + 1) * len(cells) + len(outline(cells))
    assert covered(samples, cells) == samples and is_whole(samples, cells)
    assert {(s.num_rows, s.width) for s in samples} == {(c.num_rows, c.width) for c in cells}
    assert {c.num_rows for c in cells} == {1, 2, 4, 8, 16, 24}
    assert max(c.num_rows * c.width for c in cells) <= LIMITS.max_step_positions
    assert samples[0].step_ms == pytest.approx(samples[0].num_rows * samples[0].width)
    assert {(s.num_rows, s.width) for s in samples if s.other_width == 2} == {
        (4, 8),
        (8, 8),
        (16, 8),
    }
    ragged = next(plan for plan in ring.plans if len({row.width for row in plan.rows}) > 1)
    assert {row.drafted_width for row in ragged.rows} == {8}, "blocks are drafted whole"
    assert CostTable(samples).raggedness == pytest.approx(0.0)


def test_the_time_is_kept_and_cheap_cells_come_first() -> None:
    ring = TimedRing(LIMITS)
    samples = sweep(ring, LIMITS, WIDTHS, 2.5, ring.clock)
    assert ring.now < 2.5 + 0.001 * LIMITS.max_step_positions
    assert samples and samples[0].num_rows == 1


class AffineRing(TimedRing):
    """Steps take a fixed time, and some for every position; blocks some more, and trees more again."""

    def receive(self, step_id: int) -> StepResult:
        plan = self.plans[-1]
        verify_ms = 20.0 + 0.25 * plan.num_positions
        draft_ms = 6.0 if plan.needs_drafter else 0.0
        draft_ms += 3.0 * any(row.is_tree for row in plan.rows)
        self.now += 1e-3 * (verify_ms + draft_ms)
        return StepResult(step_id, [], draft_ms, verify_ms)


def test_a_sweep_without_time_for_all_overprices_nothing() -> None:
    """Rows that it did not come to would cost in proportion to fewer: several times too much."""
    cells = sweep_cells(LIMITS, (1, 2, 4, 8, 16), (8, 16))
    cases = [(n, w, w) for n in (1, 2, 7, 16, 24) for w in (1, 2, 4, 8, 10)]
    cases += [(n, TREES + block, 12) for n in (1, 7, 16, 20) for block in (8, 16)]

    def swept(most_s: float) -> list[CostSample]:
        ring = AffineRing(LIMITS)
        found = sweep(ring, LIMITS, (1, 2, 4, 8, 16), most_s, ring.clock, (8, 16))
        assert ring.now < most_s + 0.1
        return found

    def prices(samples: list[CostSample]) -> list[float]:
        table = CostTable(samples)
        return [
            float(table.step_ms([width], rows, np.array([rows * verified]), 128 * rows)[0, 0])
            for rows, width, verified in cases
        ]

    expected = prices(swept(1e9))
    numbers = set()
    for tenths in range(1, 200, 3):
        samples = swept(tenths / 10)
        usable = covered(samples, cells)
        numbers.add(len(usable))
        if usable:
            # Trees whose blocks it did not come to cost what chains do.
            for found, right in zip(prices(usable), expected, strict=True):
                assert 0.9 * right < found < 1.1 * right
        if is_whole(samples, cells):
            assert usable == samples
    assert min(numbers) == 0 and len(numbers) > 10 and is_whole(samples, cells)


def test_a_small_engine_is_asked_for_what_it_holds() -> None:
    small = EngineLimits(20, 16, 40, 8, 200, 16)
    ring = TimedRing(small)
    samples = sweep(ring, small, WIDTHS, 1e9, ring.clock)
    assert {(1, 1), (1, 16), (2, 1)} <= {(s.num_rows, s.width) for s in samples}
    assert max(s.num_rows for s in samples) == 2


def test_kept_samples_come_back_for_the_same_engine_only(tmp_path: Path) -> None:
    path = cost_path(tmp_path / "new", MINE)
    assert load_samples(path, MINE) is None
    save_samples(path, MINE, SAMPLES)
    assert load_samples(path, MINE) == SAMPLES
    assert cost_path(tmp_path / "new", {**MINE, "device": "b"}) != path
    assert load_samples(path, {**MINE, "device": "b"}) is None
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format": 1}', '{"format": 1, "fingerprint": {}, "samples": 3}']
)
def test_a_broken_file_is_no_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    assert load_samples(path, {}) is None


def test_samples_of_another_shape_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"format": 1, "fingerprint": MINE, "samples": [[1, 2]]}))
    assert load_samples(path, MINE) is None


def test_a_folder_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    save_samples(tmp_path / "file" / "costs.json", MINE, SAMPLES)
    assert "cannot keep" in caplog.text


@pytest.mark.parametrize(
    "broken",
    [
        {"verify_ms": math.nan},
        {"verify_ms": 0.0},
        {"step_ms": -1.0},
        {"step_ms": math.inf},
        {"num_rows": 0},
        {"width": 1.5},
        {"context": 1 << 60},
    ],
)
def test_a_file_with_an_impossible_sample_is_no_file(
    tmp_path: Path, broken: dict[str, float]
) -> None:
    path = cost_path(tmp_path, MINE)
    save_samples(path, MINE, [*SAMPLES, SAMPLES[0]._replace(**broken)])
    assert load_samples(path, MINE) is None


def test_trees_are_measured_where_they_may_be_drafted() -> None:
    ring = TimedRing(LIMITS)
    samples = sweep(ring, LIMITS, WIDTHS, 1e9, ring.clock, tree_blocks=(8, 16))
    trees = [sample for sample in samples if sample.tree_block]
    assert {sample.num_rows for sample in trees} == {1, 2, 4, 8, 16}
    assert {(sample.width, sample.tree_block) for sample in trees} == {(12, 8), (12, 16)}
    rows = [row for plan in ring.plans for row in plan.rows if row.is_tree]
    assert {(row.width, row.drafted_width) for row in rows} == {(12, 8), (12, 16)}
    assert not any(cell.tree_block for cell in sweep_cells(LIMITS, WIDTHS))
