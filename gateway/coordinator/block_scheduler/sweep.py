"""The start-up sweep: what steps take on this machine, measured around the ring before anybody is served.

Steps hold made-up rows on pages that nobody owns yet; their tokens mean nothing, and every sequence writes
its pages before it reads them. The drafter is fed as in served steps: when it drafts, and not in plain ones.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from dflash_wire.ports import EngineLimits, StepRing
from dflash_wire.records import Ingest, Row, StepPlan
from dflash_wire.sampling import SamplingParams
from gateway.coordinator.block_scheduler.cost_table import CostSample

NEAR, FAR = 128, 1024
"""Committed tokens per row: of all cells, and of a few to price context by."""
FAR_CELLS = ((1, 1), (4, 4), (8, 8))
RAGGED_ROWS, RAGGED_WIDTHS = (4, 8, 16), (8, 2)
"""Cells whose rows verify one of two widths in turn, to price that by."""
TREE_ROWS, TREE_WIDTH = (1, 2, 4, 8, 16, 32), 12
"""Cells whose rows verify trees, to price what those take beyond chains."""
NUM_ROUNDS = 4
"""Every cell is measured in each, far apart, for machines slow down and recover; before the first, one step
of each cell of the outline, which counts where no round comes to it;"""
NUM_COUNTED = 2
"""in so many steps on end, after one that does not count: served steps mostly follow their like."""
FED_TOKENS = 3
"""Committed tokens of the step before that a row has the drafter ingest, where its width allows."""
ANY_TOKEN = 0
"""What pools of tokens hold before anything is written, too: a drafter that looks for repetitions finds as
many as it is asked for."""


class Cell(NamedTuple):
    """One kind of step: rows of one context and width, but for every other one if that is to differ."""

    num_rows: int
    width: int
    context: int
    other_width: int = 0
    """0: all have ``width``."""
    tree_block: int = 0
    """Rows draft trees out of blocks of this width; 0: chains."""

    def width_of(self, index: int) -> int:
        """Verify width of a row."""
        return self.other_width if self.other_width and index % 2 else self.width

    @property
    def is_of_grid(self) -> bool:
        """Whether it prices rows and widths, or blocks of trees; others price contexts and raggedness."""
        return self.context == NEAR and not self.other_width

    @property
    def kind(self) -> tuple[int, int]:
        """What a table interpolates along rows: its width, and its block if it is of trees."""
        return self.width, self.tree_block


def sweep_cells(
    limits: EngineLimits, draft_widths: Sequence[int], tree_blocks: Sequence[int] = ()
) -> list[Cell]:
    """Return the cells that the engine can hold: powers of two of rows, cheap ones first."""
    rows = [1 << i for i in range(limits.max_rows.bit_length()) if 1 << i <= limits.max_rows]
    if limits.max_rows not in rows:
        rows.append(limits.max_rows)
    cells = [Cell(n, width, NEAR) for n in rows for width in draft_widths]
    cells += [Cell(n, width, FAR) for n, width in FAR_CELLS if width in draft_widths]
    widest, narrow = RAGGED_WIDTHS
    if widest in draft_widths:
        cells += [Cell(n, widest, NEAR, narrow) for n in RAGGED_ROWS if n in rows]
    for width in tree_blocks:
        cells += [Cell(n, TREE_WIDTH, NEAR, 0, width) for n in TREE_ROWS if n in rows]
    fitting = [cell for cell in cells if _fits(cell, limits)]
    return sorted(fitting, key=lambda cell: cell.num_rows * (cell.width + cell.context // NEAR))


def outline(cells: Sequence[Cell]) -> list[Cell]:
    """Of the sweep's cells, those of plain decoding and of the narrowest and the widest chain, at all rows.

    Less than these says nothing of the others: a draft's price jumps from none to the narrowest, and prices
    of many rows that follow from few are too high several times over.
    """
    chains = [cell for cell in cells if cell.is_of_grid and not cell.tree_block]
    widths = sorted({cell.width for cell in chains})
    return [cell for cell in chains if cell.width in {*widths[:2], *widths[-1:]}]


def covered(samples: Sequence[CostSample], cells: Sequence[Cell]) -> list[CostSample]:
    """Return the samples of widths and blocks that were measured at all of their numbers of rows.

    Args:
        samples: of a sweep that may have run out of time.
        cells: that it was to measure.

    Returns:
        all samples of a whole sweep; none where the outline is not whole.
    """
    missing = set(cells).difference(map(_cell_of, samples))
    cut = {cell.kind for cell in missing if cell.is_of_grid}
    if not missing.isdisjoint(outline(cells)):
        return []
    return [sample for sample in samples if _cell_of(sample).kind not in cut]


def is_whole(samples: Sequence[CostSample], cells: Sequence[Cell]) -> bool:
    """Whether every cell was measured in a round at least."""
    counts = Counter(map(_cell_of, samples))
    return all(counts[cell] >= NUM_COUNTED for cell in cells)


def sweep(
    ring: StepRing,
    limits: EngineLimits,
    draft_widths: Sequence[int],
    most_s: float,
    clock: Callable[[], float] = time.perf_counter,
    tree_blocks: Sequence[int] = (),
) -> list[CostSample]:
    """Measure the outline in short, then all cells in turn, in several rounds.

    The engine must be idle. Step ids are negative, so the coordinator's own follow them.

    Args:
        ring: to drafters and verifier.
        limits: what the engine can hold.
        draft_widths: 1 among them.
        most_s: begin no step after so many seconds. Cells that were never reached have no sample, those of
            the outline one if no round came to them; the cheap ones come first.
        clock: monotonic seconds.
        tree_blocks: measure trees out of blocks of these widths too.

    Raises:
        EngineUnavailableError: an executor is gone.
    """
    cells = sweep_cells(limits, draft_widths, tree_blocks)
    outlined, samples, uncounted = list[CostSample](), list[CostSample](), list[CostSample]()
    visit = [uncounted] + [samples] * NUM_COUNTED
    order = [(cell, outlined) for cell in outline(cells)]
    order += [(cell, kept) for _ in range(NUM_ROUNDS) for cell in cells for kept in visit]
    deadline = clock() + most_s
    for step_id, (cell, kept) in zip(range(-len(order), 0), order, strict=True):
        if clock() >= deadline:
            break
        kept.append(_run(ring, _plan(cell, step_id, limits), cell, clock))
    reached = set(map(_cell_of, samples))
    return samples + [sample for sample in outlined if _cell_of(sample) not in reached]


def _cell_of(sample: CostSample) -> Cell:
    """The cell that a sample was measured in."""
    context = sample.context // sample.num_rows
    return Cell(sample.num_rows, sample.width, context, sample.other_width, sample.tree_block)


def _run(ring: StepRing, plan: StepPlan, cell: Cell, clock: Callable[[], float]) -> CostSample:
    began = clock()
    ring.send(plan)
    result = ring.receive(plan.step_id)
    step_ms = 1e3 * (clock() - began)
    context = cell.num_rows * cell.context
    return CostSample(
        cell.num_rows,
        cell.width,
        context,
        result.draft_ms,
        result.verify_ms,
        step_ms,
        cell.other_width,
        cell.tree_block,
    )


def _plan(cell: Cell, step_id: int, limits: EngineLimits) -> StepPlan:
    base = step_id % 2 * limits.max_step_positions
    plan = StepPlan(step_id, [], feature_base=base)
    fed = min(FED_TOKENS, cell.width)
    tokens = [ANY_TOKEN] * fed if limits.all_drafters[0].reads_tokens else None
    for index, page_ids in enumerate(_page_tables(cell, limits)):
        sampling = SamplingParams(seed=index)
        width = cell.width_of(index)
        row = Row(index, [ANY_TOKEN], cell.context, page_ids, width, sampling=sampling)
        row.draft_width, row.is_tree = cell.tree_block or cell.width, cell.tree_block > 0
        plan.rows.append(row)
        if cell.width > 1:  # the coordinator hardly ever feeds the drafter in a plain step
            first = (limits.max_step_positions - base) + index * cell.width
            ingest = Ingest(first, fed, cell.context - fed, page_ids, token_ids=tokens)
            plan.ingests.append(ingest)
    return plan


def _page_tables(cell: Cell, limits: EngineLimits) -> Iterator[list[int]]:
    num_pages = _pages_per_row(cell, limits)
    for index in range(cell.num_rows):
        yield list(range(index * num_pages, (index + 1) * num_pages))


def _pages_per_row(cell: Cell, limits: EngineLimits) -> int:
    return -(-(cell.context + cell.width) // limits.page_size)


def _fits(cell: Cell, limits: EngineLimits) -> bool:
    return (
        cell.num_rows * cell.width <= limits.max_step_positions
        and cell.context + cell.width <= limits.max_context
        and cell.num_rows * _pages_per_row(cell, limits) <= limits.num_pages
    )
