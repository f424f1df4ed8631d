"""The closed loop is deterministic, holds policies to their protocol and counts switches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from gateway.coordinator.block_scheduler.records import Decision, RowState, StepLoad
from loadtest.simulator.baselines import RatioEma, SmartSpec, StaticWidth
from loadtest.simulator.changes import PHASE_STEPS, changes
from loadtest.simulator.costs import COSTS, CPU, MEMORY_BOUND, ServedCost
from loadtest.simulator.loop import Phase, Scenario, simulate
from loadtest.simulator.matrix import FIXED, Cell, Effort, run_cell, run_cells, static_name
from loadtest.simulator.run_record import num_switches
from loadtest.simulator.worlds import TRAFFICS, pool_of

pytestmark = pytest.mark.unit


def scenario(streams: int = 8, max_steps: int = 200, seed: int = 0) -> Scenario:
    return Scenario((Phase(0, TRAFFICS["mixed"], streams),), CPU, max_steps, seed=seed)


def test_a_seed_decides_everything() -> None:
    first = simulate(SmartSpec(CPU.sweep(0)), scenario())
    pool_of.cache_clear()
    again = simulate(SmartSpec(CPU.sweep(0)), scenario())
    other = simulate(SmartSpec(CPU.sweep(0)), scenario(seed=1))
    assert np.array_equal(first.tokens, again.tokens)
    assert np.array_equal(first.step_ms, again.step_ms)
    assert not np.array_equal(first.tokens, other.tokens)


def test_the_number_of_processes_changes_nothing() -> None:
    chosen = [Cell(CPU, TRAFFICS["mixed"], streams) for streams in (4, 8)]
    alone, shared = (run_cells(chosen, ["adaptive"], Effort(40), jobs) for jobs in (1, 2))
    assert alone == shared


def test_a_change_of_streams_keeps_the_others_and_forgets_the_dropped() -> None:
    class Watching(StaticWidth):
        def __init__(self) -> None:
            super().__init__(2)
            self.live: set[int] = set()
            self.seen: list[set[int]] = []

        def decide(self, rows: Sequence[RowState], load: StepLoad) -> Decision:
            self.live |= {row.seq_id for row in rows}
            self.seen.append({row.seq_id for row in rows})
            assert self.live == self.seen[-1]
            return super().decide(rows, load)

        def forget(self, seq_id: int) -> None:
            self.live.remove(seq_id)

    policy = Watching()
    mixed, code = TRAFFICS["mixed"], TRAFFICS["code"]
    phases = (Phase(0, mixed, 2), Phase(5, mixed, 6), Phase(10, mixed, 3), Phase(15, code, 3))
    record = simulate(policy, Scenario(phases, CPU, 20))
    assert record.num_rows.tolist() == [2] * 5 + [6] * 5 + [3] * 10
    assert policy.seen[9] & policy.seen[10]
    assert not policy.seen[14] & policy.seen[15]


@pytest.mark.parametrize("widths", [[2], [0, 1], [3, 3]])
def test_a_decision_that_does_not_fit_is_refused(widths: list[int]) -> None:
    class Misfit(StaticWidth):
        def decide(self, rows: Sequence[RowState], load: StepLoad) -> Decision:
            return Decision(1, 2, widths, 0.0, 0.0, "", "")

    with pytest.raises(ValueError, match="decision 1 does not fit"):
        simulate(Misfit(2), scenario(streams=2))


@pytest.mark.parametrize(
    ("widths", "expected"),
    [
        ([4, 4, 4], 0),
        ([4, 8, 8, 8], 1),
        ([1, 4, 1, 1], 0),
        ([1, 4, 4, 1], 0),
        ([1, 4, 8, 1], 0),
        ([1, 4, 4, 4, 1], 2),
        ([1, 4, 1, 4, 1], 0),
        ([16, 8, 4, 1], 3),
        ([1, 16, 1, 8, 8, 8], 1),
        ([4, 4, 4, 16, 8, 8, 8, 8], 1),
        ([4, 16, 16, 8, 8, 8], 1),
        ([4, 16, 8, 8, 4], 3),
        ([4, 16, 8], 2),
        ([4, 8], 1),
    ],
)
def test_switches_are_changes_that_last(widths: list[int], expected: int) -> None:
    assert num_switches(np.array(widths)) == expected


def test_recovery_is_counted_from_the_change() -> None:
    class Late(StaticWidth):
        def decide(self, rows: Sequence[RowState], load: StepLoad) -> Decision:
            self._width = 8 if self._num_decisions >= 60 else 1
            return super().decide(rows, load)

    phases = (Phase(0, TRAFFICS["code"], 8),)
    record = simulate(Late(1), Scenario(phases, CPU, 120, has_best_rate=True))
    assert 50 <= record.recovery_steps(0, 120) <= 60
    assert record.recovery_steps(0, 40) == 40
    assert record.recovery_steps(70, 120) == 0


def test_every_change_has_a_name_per_phase() -> None:
    for change in changes():
        assert len(change.names) == len(change.phases)
        starts = [phase.start_step for phase in change.phases]
        assert starts == [PHASE_STEPS * number for number in range(len(starts))]


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_more_work_never_takes_less_time(cost: ServedCost) -> None:
    for num_rows in (1, 3, 8, 40, 256):
        widths = np.arange(1, 17)
        time = cost.times(num_rows, num_rows * widths, widths, 300 * num_rows)
        assert np.all(np.diff(time.step_ms) >= 0)
        assert np.all(time.step_ms > time.draft_ms + time.verify_ms)
    sweep = cost.sweep(0)
    assert len(sweep) == 9 * 7 * 4
    assert {sample.draft_ms for sample in sweep if sample.width == 1} == {0.0}


@pytest.mark.parametrize("cost", COSTS.values(), ids=lambda cost: cost.name)
def test_rows_of_width_one_are_not_drafted(cost: ServedCost) -> None:
    """As the drafter packs only rows that have something to draft."""
    positions, widths = np.array([64 + 6]), np.array([4])
    two = cost.times(64, positions, widths, 0, num_drafted=2)
    assert two.draft_ms == cost.times(2, np.array([8]), widths, 0).draft_ms
    assert two.draft_ms < cost.times(64, positions, widths, 0).draft_ms
    assert two.verify_ms == cost.times(64, positions, widths, 0).verify_ms


def test_the_measured_grid_is_kept() -> None:
    time = replace(CPU, ms_per_context=0.0).times(8, np.array([64]), np.array([8]), 1000)
    assert time.draft_ms[0] == pytest.approx(4.4)
    assert time.verify_ms[0] == pytest.approx(17.9)
    assert time.step_ms[0] == pytest.approx(4.4 + 17.9 + 1.0 + 0.16)


def test_statics_rank_by_load() -> None:
    effort = Effort(600)
    code = TRAFFICS["code"]
    alone = run_cell(Cell(MEMORY_BOUND, code, 2), [], effort)
    crowded = run_cell(Cell(MEMORY_BOUND, code, 128), [], replace(effort, tokens_per_stream=400))
    order = sorted(FIXED, key=lambda name: alone.rates[name].tokens_per_s)
    assert order == [static_name(width) for width in (1, 2, 4, 6, 8, 12, 16)]
    assert crowded.best_static in ("static:4", "static:6", "static:8")
    assert crowded.share("static:16", crowded.best_static) < 0.95


def test_the_ratio_of_accepted_to_drafted_underrates_wide_blocks() -> None:
    cell = Cell(MEMORY_BOUND, TRAFFICS["code"], 8)
    result = run_cell(cell, ["ratio-ema", "smartspec"], Effort(600))
    assert result.share("ratio-ema", result.best_static) < 0.93
    assert result.share("smartspec", result.best_static) > 0.97


def test_the_ratio_never_comes_back_from_plain_decoding() -> None:
    phases = (Phase(0, TRAFFICS["prose"], 8), Phase(150, TRAFFICS["code"], 8))
    policy = RatioEma(CPU.sweep(0))
    record = simulate(policy, Scenario(phases, CPU, 300, has_best_rate=True))
    assert np.all(record.draft_widths[150:] == 1)
    assert record.recovery_steps(150, 300) == 150
