"""Cells of a closed loop in an order that lets a drift of the machine hit all policies alike."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from tqdm import tqdm

from loadtest.bench_report import rotated
from loadtest.closed_loop import Cell, ClosedLoop
from loadtest.metrics_reader import MetricsReader

PROMPTS_APART = 37
"""How far the repeats' first prompts lie apart; cells of one repeat all get the same prompts."""

Key = TypeVar("Key", bound=Hashable)


def orders(policies: Sequence[str], repeats: int) -> list[list[str]]:
    """Return an order per repeat: every second one is the reverse of that before it."""
    chosen = []
    for repeat in range(repeats):
        order = rotated(policies, repeat // 2)
        chosen.append(order[::-1] if repeat % 2 else order)
    return chosen


async def measure_interleaved(
    loops: Mapping[Key, ClosedLoop],
    levels: Sequence[int],
    warm_up_s: Mapping[str, float],
    repeats: int,
    measure_s: float,
    reader: MetricsReader | None = None,
) -> dict[Key, list[Cell]]:
    """Run every policy at every level of every loop ``repeats`` times.

    Args:
        loops: by what tells their requests apart: traffic, temperature.
        levels: numbers of streams.
        warm_up_s: the policies, and how long each runs before a window.
        repeats: windows per policy, level and loop.
        measure_s: length of a window.
        reader: of the server's metrics, if cells should say how much its counters rose.

    Returns:
        Cells by the loop's key; those of one policy and level in the order of repeats.

    Raises:
        BenchError: a request failed, or the metrics cannot be read.
    """
    cells: dict[Key, list[Cell]] = {key: [] for key in loops}
    with tqdm(total=repeats * len(loops) * len(levels) * len(warm_up_s), unit="cell") as progress:
        for repeat, order in enumerate(orders(list(warm_up_s), repeats)):
            for key, loop in loops.items():
                for level in levels:
                    for policy in order:
                        progress.set_postfix_str(f"{key}, {level} streams, {policy}")
                        first = repeat * PROMPTS_APART
                        before = reader.read() if reader else {}
                        cell = await loop.run(policy, level, warm_up_s[policy], measure_s, first)
                        after = reader.read() if reader else {}
                        rise = {name: after[name] - before.get(name, 0.0) for name in after}
                        cells[key].append(replace(cell, counted=rise))
                        progress.update()
    return cells
