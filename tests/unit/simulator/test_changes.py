"""A drafter that loses its touch is soon left alone, and one that is good again soon used."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gateway.coordinator.block_scheduler.records import Decision
from gateway.coordinator.block_scheduler.scheduler import PROBE
from loadtest.simulator.bars import MOST_RECOVERY_STEPS, MOST_SWITCHES_PER_S
from loadtest.simulator.changes import PHASE_STEPS
from loadtest.simulator.costs import COSTS, CPU, MOE, ServedCost
from loadtest.simulator.loop import Drafter, Phase, Scenario, simulate
from loadtest.simulator.matrix import Cell, Effort, run_cell, scheduler_of
from loadtest.simulator.run_record import RunRecord
from loadtest.simulator.served import ServedScheduler
from loadtest.simulator.worlds import TRAFFICS


def stale_and_back(cost: ServedCost, seed: int, streams: int) -> tuple[RunRecord, list[Decision]]:
    """Play a drafter that is good, stale, and good again; also the decisions since it came back."""
    states = (Drafter.UP, Drafter.STALE, Drafter.UP)
    phases = tuple(
        Phase(index * PHASE_STEPS, TRAFFICS["math"], streams, state)
        for index, state in enumerate(states)
    )
    scheduler = scheduler_of(cost, seed)
    steps = len(phases) * PHASE_STEPS
    scenario = Scenario(phases, cost, steps, seed=seed, has_best_rate=True)
    record = simulate(ServedScheduler(scheduler), scenario)
    return record, [d for d in scheduler.log if d.decision_id > steps - PHASE_STEPS]


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_stale_drafts_are_given_up_and_found_again(cost: ServedCost) -> None:
    record, _ = stale_and_back(cost, seed=0, streams=8)
    for start in (PHASE_STEPS, 2 * PHASE_STEPS):
        assert record.recovery_steps(start, start + PHASE_STEPS) <= MOST_RECOVERY_STEPS


def test_a_probe_that_finds_something_is_followed_by_one_of_more_rows() -> None:
    _, decisions = stale_and_back(MOE, seed=0, streams=8)
    probes = [d for d in decisions if d.state == PROBE]
    few = [(a, b) for a, b in pairwise(probes) if sum(width > 1 for width in a.widths) == 4]
    assert few
    first, second = few[-1]
    assert min(second.widths) > 1
    assert second.decision_id - first.decision_id <= 4


def test_requests_of_many_kinds_change_the_width_less_than_once_a_second() -> None:
    cell = Cell(CPU, TRAFFICS["mixed"], 1)
    rate = run_cell(cell, ["adaptive"], Effort(2000, seed=0)).rates["adaptive"]
    assert 0.3 <= rate.switches_per_s <= MOST_SWITCHES_PER_S
