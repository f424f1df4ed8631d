"""Every policy in every cell of traffic, cost and streams; the same requests and luck for all of a cell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import NamedTuple

from gateway.coordinator.block_scheduler.cost import StepCostModel
from gateway.coordinator.block_scheduler.cost_table import CostTable
from gateway.coordinator.block_scheduler.scheduler import BlockScheduler, SchedulerSettings
from gateway.coordinator.block_scheduler.survival import SurvivalEstimator
from gateway.coordinator.block_scheduler.table_policy import WidthTable
from loadtest.simulator.baselines import BatchTable, RatioEma, SmartSpec, StaticWidth
from loadtest.simulator.costs import ServedCost
from loadtest.simulator.loop import STATIC_WIDTHS, Phase, Policy, Scenario, simulate
from loadtest.simulator.served import ServedScheduler
from loadtest.simulator.worlds import TRAINED_WIDTH, Traffic

STREAMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FEW_STREAMS = 4
"""Below, a run takes as many tokens as so many streams would: else it has too few requests."""
MANY_STREAMS = 64
"""From here on a run takes half the tokens per stream: there are enough of them."""
WARM_UP = 0.25
"""Share of a run's tokens that is not measured."""

Factory = Callable[[ServedCost, int], Policy]


def scheduler_of(
    table: ServedCost, seed: int, settings: SchedulerSettings | None = None
) -> BlockScheduler:
    """Build the block scheduler with what a start-up sweep of ``table`` measures."""
    cost = StepCostModel(CostTable(table.sweep(seed), table.captured_sizes))
    return BlockScheduler(SurvivalEstimator(TRAINED_WIDTH), cost, WidthTable(), settings)


def adaptive(table: ServedCost, seed: int, settings: SchedulerSettings | None = None) -> Policy:
    """Build the block scheduler, learning while steps are in flight."""
    return ServedScheduler(scheduler_of(table, seed, settings))


def _static(width: int, table: ServedCost, seed: int) -> Policy:
    return StaticWidth(width)


def static_name(width: int) -> str:
    """Return the policy name of a fixed width."""
    return "off" if width == 1 else f"static:{width}"


FIXED: dict[str, Factory] = {static_name(width): partial(_static, width) for width in STATIC_WIDTHS}
POLICIES: dict[str, Factory] = {
    "adaptive": adaptive,
    "table": lambda table, seed: BatchTable(),
    "ratio-ema": lambda table, seed: RatioEma(table.sweep(seed)),
    "smartspec": lambda table, seed: SmartSpec(table.sweep(seed)),
    **FIXED,
}


class Cell(NamedTuple):
    """One load to be judged in."""

    cost: ServedCost
    traffic: Traffic
    num_streams: int


class CellRate(NamedTuple):
    """What one policy gave in one cell, after the warm-up."""

    tokens_per_s: float
    """Luck left out."""
    drawn_tokens_per_s: float
    acceptance_length: float
    mean_width: float
    """Verified positions per cycle."""
    switches_per_s: float


@dataclass(frozen=True, slots=True)
class CellResult:
    """One cell with all policies that ran in it."""

    cell: Cell
    rates: dict[str, CellRate]

    @property
    def best_static(self) -> str:
        """Name of the fixed width with the highest throughput."""
        return max((name for name in self.rates if name in FIXED), key=self._rate)

    def share(self, policy: str, of: str) -> float:
        """Return the throughput of ``policy`` over that of another one."""
        return self._rate(policy) / self._rate(of)

    def _rate(self, policy: str) -> float:
        return self.rates[policy].tokens_per_s


@dataclass(frozen=True, slots=True)
class Effort:
    """How long a cell runs."""

    tokens_per_stream: int = 3000
    seed: int = 0
    is_tagged: bool = False

    def scenario(self, cell: Cell) -> Scenario:
        """Return the cell's run: it ends with its tokens, so every policy meets the same requests."""
        tokens = self.tokens_per_stream * max(1, FEW_STREAMS // cell.num_streams)
        if cell.num_streams >= MANY_STREAMS:
            tokens //= 2
        return Scenario(
            phases=(Phase(0, cell.traffic, cell.num_streams),),
            cost=cell.cost,
            max_steps=tokens,
            max_tokens=tokens * cell.num_streams,
            seed=self.seed,
            is_tagged=self.is_tagged,
        )


def cells(
    costs: Iterable[ServedCost], traffics: Sequence[Traffic], streams: Sequence[int]
) -> Iterator[Cell]:
    """Yield all cells, ordered by cost, traffic and streams."""
    for cost in costs:
        for traffic in traffics:
            for num_streams in streams:
                yield Cell(cost, traffic, num_streams)


def run_cell(cell: Cell, policies: Iterable[str], effort: Effort) -> CellResult:
    """Run ``policies``, and all static widths that a share needs, in one cell."""
    names = dict.fromkeys([*policies, *FIXED])
    scenario = effort.scenario(cell)
    return CellResult(cell, {name: _run(name, scenario) for name in names})


def run_cells(
    chosen: Sequence[Cell], policies: Sequence[str], effort: Effort, num_jobs: int = 1
) -> list[CellResult]:
    """Run all cells, in ``num_jobs`` processes; how many does not change what comes out."""
    run = partial(run_cell, policies=policies, effort=effort)
    if num_jobs == 1:
        return list(map(run, chosen))
    with ProcessPoolExecutor(num_jobs, mp_context=get_context("spawn")) as pool:
        return list(pool.map(run, chosen))


def _run(name: str, scenario: Scenario) -> CellRate:
    record = simulate(POLICIES[name](scenario.cost, scenario.seed), scenario)
    since = record.first_step(int(WARM_UP * (scenario.max_tokens or 0)))
    return CellRate(
        tokens_per_s=record.expected_throughput(since),
        drawn_tokens_per_s=record.throughput(since),
        acceptance_length=record.acceptance_length(since),
        mean_width=float(record.positions[since:].sum() / record.num_rows[since:].sum()),
        switches_per_s=record.switches_per_second(since),
    )
