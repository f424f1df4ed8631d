"""Cells of a closed loop in an order that lets a drift of the machine hit all policies alike."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from tqdm import tqdm

from loadtest.bench_report import rotated
from loadtest.closed_loop import Cell, ClosedLoop

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
) -> dict[Key, list[Cell]]:
    """Run every policy at every level of every loop ``repeats`` times.

    Args:
        loops: by what tells their requests apart: traffic, temperature.
        levels: numbers of streams.
        warm_up_s: the policies, and how long each runs before a window.
        repeats: windows per policy, level and loop.
        measure_s: length of a window.

    Returns:
        Cells by the loop's key; those of one policy and level in the order of repeats.

    Raises:
        BenchError: a request failed.
    """
    cells: dict[Key, list[Cell]] = {key: [] for key in loops}
    with tqdm(total=repeats * len(loops) * len(levels) * len(warm_up_s), unit="cell") as progress:
        for repeat, order in enumerate(orders(list(warm_up_s), repeats)):
            for key, loop in loops.items():
                for level in levels:
                    for policy in order:
                        progress.set_postfix_str(f"{key}, {level} streams, {policy}")
                        first = repeat * PROMPTS_APART
                        cell = await loop.run(policy, level, warm_up_s[policy], measure_s, first)
                        cells[key].append(cell)
                        progress.update()
    return cells
