"""From cells of a closed loop to a table: medians, percentiles, and who wins where."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from loadtest.bench_report import PLAIN, aligned_table, rounded
from loadtest.closed_loop import Answer, Cell, acceptance_length
from loadtest.timing import percentile

BARS = {1: 2.0, 8: 1.3}
"""Goal for the best width over plain decoding, by number of streams."""


@dataclass(frozen=True)
class ServingRow:
    """One policy at one level. Times in milliseconds."""

    num_streams: int
    policy: str
    tokens_per_s: float
    """Median over the repeats."""
    ratio_to_off: float
    """Median over the repeats of the ratio within a repeat."""
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    acceptance_length: float
    num_answers: int


@dataclass(frozen=True)
class ServingReport:
    """All rows, by level and policy in the order of measurement."""

    rows: list[ServingRow]

    def best(self, num_streams: int) -> ServingRow | None:
        """The drafting policy with the highest ratio at a level."""
        drafting = [r for r in self.rows if r.num_streams == num_streams and r.policy != PLAIN]
        return max(drafting, key=lambda row: row.ratio_to_off, default=None)

    @property
    def levels(self) -> list[int]:
        """Numbers of streams, ascending."""
        return sorted({row.num_streams for row in self.rows})

    @property
    def plain_wins_from(self) -> int | None:
        """The lowest level from which on plain decoding is never beaten; None if it always is."""
        winning: int | None = None
        for level in reversed(self.levels):
            best = self.best(level)
            if best is not None and best.ratio_to_off > 1.0:
                break
            winning = level
        return winning


def evaluate(cells: Sequence[Cell]) -> ServingReport:
    """Summarize cells; every policy has as many at a level as ``off``, in the same order."""
    grouped: dict[tuple[int, str], list[Cell]] = {}
    for cell in cells:
        grouped.setdefault((cell.num_streams, cell.policy), []).append(cell)
    levels = list(dict.fromkeys(level for level, _ in grouped))
    policies = list(dict.fromkeys(policy for _, policy in grouped))
    rows = []
    for level in levels:
        plain = [cell.tokens_per_s for cell in grouped[level, PLAIN]]
        rows += [_row(grouped[level, policy], plain) for policy in sorted(policies, key=_order)]
    return ServingReport(rows)


def _order(policy: str) -> int:
    return 1 if policy == PLAIN else int(policy.rpartition(":")[2])


def _row(cells: Sequence[Cell], plain: Sequence[float]) -> ServingRow:
    rates = [cell.tokens_per_s for cell in cells]
    answers = [answer for cell in cells for answer in cell.answers]
    ttft = [1e3 * answer.ttft_s for answer in answers]
    tpot = [1e3 * value for value in _tpots(answers)]
    return ServingRow(
        num_streams=cells[0].num_streams,
        policy=cells[0].policy,
        tokens_per_s=median(rates),
        ratio_to_off=median(rate / base for rate, base in zip(rates, plain, strict=True)),
        ttft_p50_ms=percentile(ttft, 50),
        ttft_p99_ms=percentile(ttft, 99),
        tpot_p50_ms=percentile(tpot, 50),
        tpot_p99_ms=percentile(tpot, 99),
        acceptance_length=acceptance_length(answers) or 0.0,
        num_answers=len(answers),
    )


def _tpots(answers: Sequence[Answer]) -> list[float]:
    return [tpot for answer in answers if (tpot := answer.tpot_s) is not None]


def render_table(report: ServingReport) -> str:
    """Return the table, the bars and the crossing as text."""
    header = [
        *("streams", "policy", "tokens/s", "x off", "tau", "TTFT p50", "p99 ms"),
        *("ms/token p50", "p99", "answers"),
    ]
    lines = [
        [
            str(row.num_streams),
            row.policy,
            f"{row.tokens_per_s:.0f}",
            f"{row.ratio_to_off:.2f}",
            f"{row.acceptance_length:.2f}",
            f"{row.ttft_p50_ms:.0f}",
            f"{row.ttft_p99_ms:.0f}",
            f"{row.tpot_p50_ms:.2f}",
            f"{row.tpot_p99_ms:.2f}",
            str(row.num_answers),
        ]
        for row in report.rows
    ]
    return "\n".join([aligned_table([header, *lines]), "", *_verdicts(report)])


def _verdicts(report: ServingReport) -> list[str]:
    lines = []
    for level, limit in BARS.items():
        best = report.best(level)
        if best is not None:
            verdict = "met" if best.ratio_to_off >= limit else "MISSED"
            lines.append(
                f"best width / off at {level} streams: {best.ratio_to_off:.2f} with {best.policy} "
                f"(bar {limit:.2f}) {verdict}"
            )
    crossing = report.plain_wins_from
    lines.append(
        "plain decoding is beaten at every level"
        if crossing is None
        else f"plain decoding wins from {crossing} streams on"
    )
    return lines


def to_json(report: ServingReport, settings: dict[str, object]) -> str:
    """Return the report as one line of JSON, with the run's settings."""
    return json.dumps(
        {
            "benchmark": "closed_loop",
            **settings,
            "plain_wins_from": report.plain_wins_from,
            "rows": rounded([asdict(row) for row in report.rows]),
        }
    )
