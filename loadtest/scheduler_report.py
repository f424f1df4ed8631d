"""From cells of several policies to a regret matrix: what choosing widths won or lost."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import geometric_mean, mean

from loadtest.bench_report import PLAIN, aligned_table, rounded
from loadtest.closed_loop import Cell

JUDGED = "adaptive"
LEAST_OF_BEST, LEAST_OF_PLAIN = 0.95, 0.98
"""Bars: share of the best static width's throughput in every cell, and of plain decoding's."""
RESAMPLES = 1000
CONFIDENCE = 0.9


@dataclass(frozen=True)
class Share:
    """A ratio of mean throughputs, and where a resampled one lies nine times in ten."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}-{self.high:.2f})"


@dataclass(frozen=True)
class MatrixCell:
    """One traffic at one level."""

    traffic: str
    num_streams: int
    tokens_per_s: dict[str, float]
    """Mean by policy."""
    best_static: str
    """Over all windows."""
    of_best: Share
    """Of what was best in the other half of the repeats (see ``best_elsewhere``)."""
    of_plain: Share


def evaluate(cells: Mapping[str, Sequence[Cell]], judged: str = JUDGED) -> list[MatrixCell]:
    """Summarize windows by traffic; every policy has as many at a level, in the same order of repeats."""
    matrix = []
    for traffic, mine in cells.items():
        for level in sorted({cell.num_streams for cell in mine}):
            rates: dict[str, list[float]] = {}
            for cell in mine:
                if cell.num_streams == level:
                    rates.setdefault(cell.policy, []).append(cell.tokens_per_s)
            matrix.append(_matrix_cell(traffic, level, rates, judged))
    return matrix


def _matrix_cell(
    traffic: str, level: int, rates: dict[str, list[float]], judged: str
) -> MatrixCell:
    means = {policy: mean(mine) for policy, mine in rates.items()}
    static = [policy for policy in means if policy == PLAIN or policy.startswith("static:")]
    return MatrixCell(
        traffic,
        level,
        means,
        max(static, key=lambda policy: means[policy]),
        share(rates[judged], best_elsewhere({policy: rates[policy] for policy in static})),
        share(rates[judged], rates[PLAIN]),
    )


def best_elsewhere(rates: Mapping[str, Sequence[float]]) -> list[float]:
    """Return, window by window, the rate of the policy that was best in the other half of the repeats.

    The best of several noisy means owes some of its lead to luck, and nobody could have chosen it before.
    Pairs of opposite orders stay together; with a single pair, the best of all is taken.
    """
    num_windows = len(next(iter(rates.values())))
    best = []
    for half in (0, 1):
        others = [i for i in range(num_windows) if i // 2 % 2 != half] or range(num_windows)
        best.append(max(rates, key=lambda policy: mean(rates[policy][i] for i in others)))
    return [rates[best[i // 2 % 2]][i] for i in range(num_windows)]


def share(rates: Sequence[float], of: Sequence[float], seed: int = 0) -> Share:
    """Return mean over mean with a bootstrap interval: both sides of a repeat are drawn together."""
    rng = random.Random(seed)
    pairs = list(zip(rates, of, strict=True))
    ratios = []
    for _ in range(RESAMPLES):
        drawn = rng.choices(pairs, k=len(pairs))
        ratios.append(sum(mine for mine, _ in drawn) / sum(theirs for _, theirs in drawn))
    ratios.sort()
    outside = int((1 - CONFIDENCE) / 2 * RESAMPLES)
    return Share(mean(rates) / mean(of), ratios[outside], ratios[-1 - outside])


def policy_means(matrix: Sequence[MatrixCell]) -> dict[str, float]:
    """Return the geometric mean over all cells of each policy's throughput over plain decoding's."""
    return {
        policy: geometric_mean(
            [cell.tokens_per_s[policy] / cell.tokens_per_s[PLAIN] for cell in matrix]
        )
        for policy in matrix[0].tokens_per_s
    }


def bars(matrix: Sequence[MatrixCell], judged: str = JUDGED) -> list[tuple[str, float, bool]]:
    """Return what is asked for, what was found and whether that is enough."""
    of_best = min(cell.of_best.value for cell in matrix)
    of_plain = min(cell.of_plain.value for cell in matrix)
    means = policy_means(matrix)
    single = max(value for policy, value in means.items() if policy.startswith("static:"))
    return [
        (
            f"{LEAST_OF_BEST:.0%} of the best static width in every cell",
            of_best,
            of_best >= LEAST_OF_BEST,
        ),
        (f"{LEAST_OF_PLAIN:.0%} of off in every cell", of_plain, of_plain >= LEAST_OF_PLAIN),
        (
            f"above the best single width on the mean ({single:.2f})",
            means[judged],
            means[judged] > single,
        ),
    ]


def render(matrix: Sequence[MatrixCell], judged: str = JUDGED) -> str:
    """Return tables and bars as text."""
    policies = list(matrix[0].tokens_per_s)
    header = ["traffic", "streams", *policies, "best", "of best", "of off"]
    lines = [
        [
            cell.traffic,
            str(cell.num_streams),
            *(f"{cell.tokens_per_s[policy]:.0f}" for policy in policies),
            cell.best_static,
            str(cell.of_best),
            str(cell.of_plain),
        ]
        for cell in matrix
    ]
    means = [f"{policy} {value:.2f}" for policy, value in policy_means(matrix).items()]
    verdicts = [
        f"{'met   ' if is_met else 'MISSED'}  {name}: {found:.2f}"
        for name, found, is_met in bars(matrix, judged)
    ]
    return "\n".join(
        [
            f"tokens/s; shares of {judged} with 90 % intervals",
            aligned_table([header, *lines]),
            "",
            "over off, geometric mean: " + ", ".join(means),
            *verdicts,
        ]
    )


def to_json(matrix: Sequence[MatrixCell], settings: dict[str, object]) -> str:
    """Return the report as one line of JSON, with the run's settings."""
    verdicts = [
        {"name": name, "value": found, "met": is_met} for name, found, is_met in bars(matrix)
    ]
    return json.dumps(
        {
            "benchmark": "scheduler",
            **settings,
            "cells": rounded([asdict(cell) for cell in matrix]),
            "bars": rounded(verdicts),
        }
    )
