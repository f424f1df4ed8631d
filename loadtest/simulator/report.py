"""Tables for people and one line of JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Sequence

from loadtest.simulator.bars import Bar, cell_name, geometric_means
from loadtest.simulator.changes import Recovery
from loadtest.simulator.matrix import FIXED, CellResult
from loadtest.simulator.paper import PUBLISHED_LENGTHS, PUBLISHED_SPEEDUPS, PaperRow


def render_cells(results: Sequence[CellResult]) -> str:
    """Return one line per cell: each policy over the best static width and over plain decoding."""
    policies = [name for name in results[0].rates if name not in FIXED]
    head = f"{'cost':14}{'traffic':8}{'streams':>8}{'best static':>12}{'tok/s':>8}{'/off':>7}"
    for name in policies:
        head += f" | {name:>9} {'/off':>6} {'width':>5} {'sw/s':>5}"
    return "\n".join(
        [
            "simulated; policies as a share of the best static width",
            head,
            *(_cell(r, policies) for r in results),
        ]
    )


def _cell(result: CellResult, policies: Sequence[str]) -> str:
    cost, traffic, num_streams = result.cell
    best = result.best_static
    line = f"{cost.name:14}{traffic.name:8}{num_streams:8}{best:>12}"
    line += f"{result.rates[best].tokens_per_s:8.0f}{result.share(best, 'off'):7.2f}"
    for name in policies:
        rate = result.rates[name]
        line += f" | {result.share(name, best):9.3f} {result.share(name, 'off'):6.2f}"
        line += f" {rate.mean_width:5.1f} {rate.switches_per_s:5.2f}"
    return line


def render_means(results: Sequence[CellResult]) -> str:
    """Return each policy's geometric mean and worst cell."""
    lines = [f"{'policy':12}{'/off, geo-mean':>15}{'least of best':>15}  in"]
    for name, mean in geometric_means(results).items():
        worst = min(results, key=lambda r: r.share(name, r.best_static))
        least = worst.share(name, worst.best_static)
        lines.append(f"{name:12}{mean:15.3f}{least:15.3f}  {cell_name(worst)}")
    return "\n".join(lines)


def render_recoveries(recoveries: Sequence[Recovery]) -> str:
    """Return, a line per change, steps to recover and the phase's share of the best static width."""
    policies = list(dict.fromkeys(recovery.policy for recovery in recoveries))
    rows: dict[tuple[str, str], dict[str, Recovery]] = {}
    for recovery in recoveries:
        rows.setdefault((recovery.cost, recovery.change), {})[recovery.policy] = recovery
    lines = [f"{'steps to 95 %':14}{'':24}" + "".join(f"{name:>16}" for name in policies)]
    for (cost, change), found in rows.items():
        cells = (f"{found[name].num_steps:>8} ({found[name].share:.3f})" for name in policies)
        lines.append(f"{cost:14}{change:24}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def render_paper(rows: Sequence[PaperRow]) -> str:
    """Return speed-ups over plain decoding by streams, beside what is published."""
    names = list(dict.fromkeys(name for row in rows for name in row.speedups))
    names = [name for name in names if all(name in row.speedups for row in rows)]
    lines = [
        "simulation calibrated by the paper (Qwen3-8B, MATH-500): speed-up over plain decoding"
    ]
    lengths = "".join(f"{f'len {width}':>8}" for width in PUBLISHED_LENGTHS)
    lines.append(
        f"{'streams':>8}{lengths}"
        + "".join(f"{name:>11}" for name in names)
        + f"{'published':>11}  best"
    )
    for row in rows:
        line = f"{row.num_streams:8}" + "".join(
            f"{v:8.2f}" for v in row.acceptance_lengths.values()
        )
        line += "".join(f"{row.speedups[name]:11.2f}" for name in names)
        published = PUBLISHED_SPEEDUPS.get(row.num_streams)
        lines.append(
            f"{line}{published or '':>11}  {row.best_static} {row.speedups[row.best_static]:.2f}"
        )
    return "\n".join(lines)


def render_bars(policy: str, bars: Sequence[Bar]) -> str:
    """Return one line per bar."""
    lines = [f"bars of {policy}"]
    lines += [f"{'met' if bar.is_met else 'MISSED':8}{bar.name}: {bar.found}" for bar in bars]
    return "\n".join(lines)


def to_json(
    results: Sequence[CellResult],
    recoveries: Sequence[Recovery],
    paper: Sequence[PaperRow],
    bars: Sequence[Bar],
) -> str:
    """Return everything as one line."""
    cells = [
        {
            "cost": result.cell.cost.name,
            "traffic": result.cell.traffic.name,
            "streams": result.cell.num_streams,
            "best_static": result.best_static,
            "policies": {name: rate._asdict() for name, rate in result.rates.items()},
        }
        for result in results
    ]
    return json.dumps(
        {
            "is_simulated": True,
            "bars": [bar._asdict() for bar in bars],
            "geometric_means": geometric_means(results) if results else {},
            "recoveries": [recovery._asdict() for recovery in recoveries],
            "paper": [row._asdict() for row in paper],
            "cells": cells,
        }
    )
