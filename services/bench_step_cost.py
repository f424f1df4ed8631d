"""How the cost of a step grows with rows, context and width: ``make bench-step-cost``.

The real engines of the configured pair run in this process, drafter then verifier, on plans made for
the purpose: every row decodes behind a context of given length. Cells take turns, so a slow moment
hits all of them; a cell's figure is its median. With one torch thread, as shipped, times are CPU time.
Writes the figures as JSON, which ``loadtest.step_cost_chart`` draws; prints a table and ends with one line
of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from dflash_wire.errors import ConfigError
from dflash_wire.records import DraftResult, Ingest, Row, StepPlan
from dflash_wire.sampling import SamplingParams
from drafter.engine import DrafterEngine
from services.config import AppArgs
from services.local import LocalRing, build_local_ring
from services.spec import make_spec
from services.yaml_args import read_app_args

Clock = Callable[[], float]

ROWS = (1, 2, 4, 8, 16, 32)
WIDTHS = (1, 2, 4, 8, 16)
CONTEXTS = (128, 256, 512, 1024, 2000)
USUAL_CONTEXT = 256
CONTEXT_SHAPES = ((1, 1), (1, 8), (8, 1), (8, 8))
"""(rows, width) of the lines against context."""
NUM_INGESTED = 4
"""Tokens per row that the last cycle committed, for the drafter to take in."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of step."""

    num_rows: int
    widths: tuple[int, ...]
    """Given to the rows in turn."""
    context: int

    @property
    def row_widths(self) -> list[int]:
        """The width of each row."""
        return [self.widths[i % len(self.widths)] for i in range(self.num_rows)]

    @property
    def num_positions(self) -> int:
        """Verified together."""
        return sum(self.row_widths)


@dataclass(frozen=True, slots=True)
class CellCost:
    """What a cell's step takes, medians in ms."""

    cell: Cell
    draft_ms: float
    verify_ms: float

    @property
    def step_ms(self) -> float:
        """Both passes, one after the other."""
        return self.draft_ms + self.verify_ms


def all_cells() -> list[Cell]:
    """Every (rows, width) at one context, contexts for a few of them, and rows of mixed widths."""
    cells = [Cell(rows, (width,), USUAL_CONTEXT) for rows in ROWS for width in WIDTHS]
    cells += [Cell(rows, (width,), c) for rows, width in CONTEXT_SHAPES for c in CONTEXTS]
    cells += [Cell(rows, WIDTHS, USUAL_CONTEXT) for rows in ROWS[1:]]
    return list(dict.fromkeys(cells))


def make_plan(cell: Cell, page_size: int) -> StepPlan:
    """A step of ``cell``: every row on pages of its own that follow each other."""
    rows: list[Row] = []
    ingests: list[Ingest] = []
    num_ingested = 0
    num_pages = -(-(cell.context + max(cell.widths)) // page_size)
    for i, width in enumerate(cell.row_widths):
        pages = list(range(i * num_pages, (i + 1) * num_pages))
        sampling = SamplingParams(seed=i)
        rows.append(Row(i, [5 + i], cell.context, pages, width, sampling=sampling))
        if width > 1:
            taken = min(NUM_INGESTED, width)
            ingests.append(Ingest(num_ingested, taken, cell.context - taken, pages))
            num_ingested += taken
    return StepPlan(0, rows, ingests)


def clock_for(num_threads: int) -> Clock:
    """CPU time of this thread where it does all the work, as other load hardly changes it; else wall time."""
    return time.thread_time if num_threads == 1 else time.perf_counter


def run_step(ring: LocalRing, plan: StepPlan, clock: Clock) -> tuple[float, float]:
    """Run one step; return its draft and verify time in ms."""
    began = clock()
    drafts = ring.drafters[0].run(plan) if plan.needs_drafter else DraftResult.nothing(plan)
    drafted = clock()
    ring.verifier.run(plan, drafts)
    draft_ms = 1e3 * (drafted - began) if plan.needs_drafter else 0.0
    return draft_ms, 1e3 * (clock() - drafted)


def measure(args: AppArgs, cells: Sequence[Cell], repeats: int) -> list[CellCost]:
    """Measure all cells in turn, ``repeats`` times, after one round that does not count.

    Raises:
        ConfigError: the pair cannot be loaded.
    """
    num_threads = max(args.verifier.num_threads, args.drafter.num_threads)
    torch.set_num_threads(num_threads)
    clock = clock_for(num_threads)
    longest = max(cell.context + max(cell.widths) for cell in cells)
    pages = max(
        cell.num_rows * -(-(cell.context + max(cell.widths)) // args.engine.page_size)
        for cell in cells
    )
    limits = {
        "num_pages": pages,
        "max_context": longest,
        "max_step_positions": max(cell.num_positions for cell in cells),
    }
    engine = args.engine.model_copy(update=limits)
    ring, _ = build_local_ring(make_spec(args.model_copy(update={"engine": engine})))
    # Contexts of zeros would do for the time, but attention over equal keys accepts no draft.
    generator = torch.Generator().manual_seed(0)
    drafter = ring.drafters[0]
    if not isinstance(drafter, DrafterEngine):
        raise ConfigError("the chart is of DFlash's passes; name such a drafter")
    for pool in (ring.verifier.pool.data, drafter.pool.data, ring.verifier.feature_pool):
        pool.copy_(torch.randn(pool.shape, generator=generator).to(pool.dtype))
    plans = [make_plan(cell, args.engine.page_size) for cell in cells]
    times: list[list[tuple[float, float]]] = [[] for _ in cells]
    for repeat in tqdm(range(repeats + 1), unit="round"):
        for plan, mine in zip(plans, times, strict=True):
            cost = run_step(ring, plan, clock)
            if repeat:
                mine.append(cost)
    return [
        CellCost(cell, *(round(statistics.median(part), 4) for part in zip(*mine, strict=True)))
        for cell, mine in zip(cells, times, strict=True)
    ]


def to_json(args: AppArgs, costs: Sequence[CellCost], repeats: int) -> dict[str, object]:
    """Everything measured, as plain values."""
    return {
        "model": args.model.id,
        "dtype": args.model.dtype,
        "num_threads": args.verifier.num_threads,
        "repeats": repeats,
        "cells": [asdict(cost) | {"step_ms": round(cost.step_ms, 4)} for cost in costs],
    }


def render(costs: Sequence[CellCost]) -> str:
    """The table of rows against widths."""
    by_cell = {cost.cell: cost.step_ms for cost in costs}
    lines = [f"{'rows':>6}" + "".join(f"{f'width {w}':>10}" for w in WIDTHS)]
    for rows in ROWS:
        steps = (by_cell[Cell(rows, (w,), USUAL_CONTEXT)] for w in WIDTHS)
        lines.append(f"{rows:>6}" + "".join(f"{step:>10.2f}" for step in steps))
    return "\n".join(lines)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(prog="python -m services.bench_step_cost", description=__doc__)
    parser.add_argument(
        "--config", type=Path, default=Path("config.yaml"), help="as for make serve"
    )
    parser.add_argument("--repeats", type=int, default=25, help="rounds over all cells")
    parser.add_argument("--output", type=Path, default=Path("docs/step-cost.json"))
    options = parser.parse_args()
    args = read_app_args(options.config)
    costs = measure(args, all_cells(), options.repeats)
    report = json.dumps(to_json(args, costs, options.repeats))
    options.output.write_text(report + "\n", encoding="utf-8")
    print(f"step time in ms, context {USUAL_CONTEXT}\n{render(costs)}\nwrote {options.output}")
    print(report)


if __name__ == "__main__":
    main()
