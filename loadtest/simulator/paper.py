"""A simulation calibrated by the DFlash paper: Qwen3-8B on MATH-500, one large GPU.

Published and taken as given: acceptance length 7.87 at draft block 16 and 5.66 at 8; speed-up over plain
decoding with block 16 of 5.1x at 1 stream and 2.8x at 32. Everything between and beyond is this model's,
not a measurement.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from loadtest.simulator.costs import GRAPH_SIZES, Roofline, ServedCost
from loadtest.simulator.matrix import Cell, CellResult, Effort, run_cell
from loadtest.simulator.worlds import Traffic, TrafficKind

PUBLISHED_LENGTHS = {8: 5.66, 16: 7.87}
"""Acceptance length by draft block."""
PUBLISHED_SPEEDUPS = {1: 5.1, 32: 2.8}
"""Of block 16 over plain decoding, by streams."""
LONGER = 3
"""How much longer than other cells these run."""
PAPER_STREAMS = (1, 2, 4, 8, 16, 32, 64, 128)

PAPER_MATH = TrafficKind(
    "paper-math",
    first_logit=2.2335,
    slope=-0.0202,
    request_sd=0.2,
    narrow_loss=0.0,
    mean_output=400.0,
    max_output=1024,
    mean_prompt=150.0,
)
"""Two curve parameters for two published lengths. Block 8 has a drafter of its own there: no loss."""
PAPER_TRAFFIC = Traffic("paper-math", (PAPER_MATH,))
PAPER_COST = ServedCost(
    "paper",
    draft=Roofline(0.8, 0.0031),
    verify=Roofline(4.0, 0.0195),
    host_ms=0.35,
    host_ms_per_row=0.01,
    draft_host_ms=1.55,
    ms_per_context=0.036,
    captured_sizes=GRAPH_SIZES,
)
"""Weights of 16 GB read in 4 ms; drafting costs, besides its forward, what the published 5.1x leaves."""


class PaperRow(NamedTuple):
    """One number of streams: speed-ups over plain decoding by policy."""

    num_streams: int
    acceptance_lengths: dict[int, float]
    """Of static widths 8 and 16."""
    speedups: dict[str, float]
    best_static: str


def run_paper(
    policies: Sequence[str], streams: Iterable[int] = PAPER_STREAMS, effort: Effort | None = None
) -> list[PaperRow]:
    """Run ``policies`` and all static widths with the paper's calibration; outputs are long, so runs are."""
    effort = effort or Effort()
    effort = replace(effort, tokens_per_stream=LONGER * effort.tokens_per_stream)
    return [
        _row(run_cell(Cell(PAPER_COST, PAPER_TRAFFIC, num_streams), policies, effort), policies)
        for num_streams in streams
    ]


def _row(result: CellResult, policies: Sequence[str]) -> PaperRow:
    names = dict.fromkeys([*policies, "static:8", "static:16", result.best_static])
    return PaperRow(
        result.cell.num_streams,
        {width: result.rates[f"static:{width}"].acceptance_length for width in PUBLISHED_LENGTHS},
        {name: result.share(name, "off") for name in names},
        result.best_static,
    )
