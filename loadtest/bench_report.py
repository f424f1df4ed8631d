"""What a speed comparison concludes from its measurements. Pure: no clock, no network, no process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

PLAIN = "off"
"""The row that others are compared with: plain decoding on the same engine."""
TRANSFORMERS = "transformers generate"
DFLASH_LOOP = "dflash package loop"
REFERENCE_ROWS = {"hf": TRANSFORMERS, "dflash": DFLASH_LOOP}
"""Mode of the reference worker -> its row."""


@dataclass(frozen=True)
class CycleTotals:
    """Sums over the cycles of one answer; times in milliseconds, None where they are not known."""

    num_cycles: int
    num_committed: int
    """Tokens that cycles committed, bonus included; the prefill's token is not one of them."""
    draft_ms: float | None = None
    verify_ms: float | None = None
    overhead_ms: float | None = None


@dataclass(frozen=True)
class Measurement:
    """One answer of one row to one prompt."""

    row: str
    prompt_id: str
    repeat: int
    seconds: float
    """Request sent to answer complete, prefill included."""
    num_tokens: int
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    cycles: CycleTotals | None = None


@dataclass(frozen=True)
class RowResult:
    """One line of the table. Speeds are medians over repeats."""

    row: str
    tokens_per_s: float
    ratio_to_off: float | None
    acceptance_length: float | None
    draft_ms: float | None
    verify_ms: float | None
    overhead_ms: float | None
    num_compared: int
    """Answers that could be compared with ``off``."""
    num_different: int

    @property
    def is_identical(self) -> bool | None:
        """Whether every compared answer equals ``off``'s; None when none could be compared."""
        return None if self.num_compared == 0 else self.num_different == 0


@dataclass(frozen=True)
class Bar:
    """A ratio that the project promises, and what was measured; None when it was not."""

    name: str
    limit: float
    value: float | None

    @property
    def is_met(self) -> bool | None:
        """None when there is no value."""
        return None if self.value is None else self.value >= self.limit


@dataclass
class Report:
    """Rows in the order they were asked for, and the bars."""

    rows: list[RowResult] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)

    @property
    def has_failed(self) -> bool:
        """Whether a bar was missed or a served row differs from ``off``."""
        served = (row for row in self.rows if row.row not in REFERENCE_ROWS.values())
        return any(bar.is_met is False for bar in self.bars) or any(
            row.is_identical is False for row in served
        )


def rotated(rows: Sequence[str], shift: int) -> list[str]:
    """Return ``rows`` starting at another one, so that no row always runs first."""
    start = shift % len(rows)
    return [*rows[start:], *rows[:start]]


def is_same_answer(first: Measurement, second: Measurement) -> bool | None:
    """Compare by token ids where both have them, else by text; None when neither is common."""
    if first.token_ids is not None and second.token_ids is not None:
        return first.token_ids == second.token_ids
    if first.text is not None and second.text is not None:
        return first.text == second.text
    return None


def evaluate(row_names: Sequence[str], measurements: Sequence[Measurement]) -> Report:
    """Turn measurements into rows and bars."""
    rates = {name: _rates(measurements, name) for name in row_names}
    plain_answers = {(m.repeat, m.prompt_id): m for m in measurements if m.row == PLAIN}
    report = Report()
    for name in row_names:
        own = [m for m in measurements if m.row == name]
        verdicts = [
            verdict
            for m in own
            if (plain := plain_answers.get((m.repeat, m.prompt_id))) is not None
            and (verdict := is_same_answer(m, plain)) is not None
        ]
        report.rows.append(
            RowResult(
                row=name,
                tokens_per_s=median(rates[name].values()),
                ratio_to_off=_ratio(rates, name, PLAIN),
                acceptance_length=_per_cycle(own, lambda c: c.num_committed),
                draft_ms=_per_cycle(own, lambda c: c.draft_ms),
                verify_ms=_per_cycle(own, lambda c: c.verify_ms),
                overhead_ms=_per_cycle(own, lambda c: c.overhead_ms),
                num_compared=len(verdicts),
                num_different=verdicts.count(False),
            )
        )
    report.bars = _bars(rates)
    return report


def _rates(measurements: Iterable[Measurement], row: str) -> dict[int, float]:
    """Repeat -> tokens per second over all its prompts."""
    tokens: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for m in measurements:
        if m.row == row:
            tokens[m.repeat] = tokens.get(m.repeat, 0) + m.num_tokens
            seconds[m.repeat] = seconds.get(m.repeat, 0.0) + m.seconds
    return {repeat: tokens[repeat] / seconds[repeat] for repeat in tokens}


def _ratio(rates: dict[str, dict[int, float]], row: str, base: str) -> float | None:
    """Median over repeats of the ratio within a repeat, where both rows saw the same machine."""
    if row not in rates or base not in rates:
        return None
    return median(rates[row][repeat] / rates[base][repeat] for repeat in rates[row])


def _per_cycle(
    measurements: Iterable[Measurement], part: Callable[[CycleTotals], float | None]
) -> float | None:
    totals = [m.cycles for m in measurements if m.cycles is not None]
    values = [value for totals_of_one in totals if (value := part(totals_of_one)) is not None]
    num_cycles = sum(t.num_cycles for t in totals)
    return sum(values) / num_cycles if values and num_cycles else None


def _bars(rates: dict[str, dict[int, float]]) -> list[Bar]:
    static_rows = [name for name in rates if name.startswith("static:")]
    best = max(static_rows, key=lambda name: median(rates[name].values()), default="")
    return [
        Bar("best static / off", 2.0, _ratio(rates, best, PLAIN)),
        Bar("off / transformers generate", 1.0, _ratio(rates, PLAIN, TRANSFORMERS)),
        Bar("best static / dflash package loop", 1.3, _ratio(rates, best, DFLASH_LOOP)),
    ]


def render_table(report: Report) -> str:
    """Return the table and the bars as text."""
    header = ("row", "tokens/s", "x off", "tau", "draft ms", "verify ms", "overhead ms", "= off")
    lines = [list(header)]
    for row in report.rows:
        numbers = (
            row.tokens_per_s,
            row.ratio_to_off,
            row.acceptance_length,
            row.draft_ms,
            row.verify_ms,
            row.overhead_ms,
        )
        cells = ["–" if number is None else f"{number:.2f}" for number in numbers]
        lines.append([row.row, *cells, identity(row.num_compared, row.num_different)])
    return "\n".join([aligned_table(lines), "", *(bar_line(bar) for bar in report.bars)])


def aligned_table(lines: Sequence[Sequence[str]]) -> str:
    """Lay cells out in columns: the first line is the header, the first column is text."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    table = ["  ".join(_aligned(line, widths)).rstrip() for line in lines]
    table.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(table)


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    first, *rest = zip(cells, widths, strict=True)
    return [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]


def identity(num_compared: int, num_different: int) -> str:
    """Say whether answers equal those they were compared with."""
    if num_compared == 0:
        return "–"
    return f"{num_different}/{num_compared} differ" if num_different else "yes"


def bar_line(bar: Bar) -> str:
    """Say what a bar asked for and whether it was met."""
    verdict = {None: "not measured", True: "met", False: "MISSED"}[bar.is_met]
    value = "–" if bar.value is None else f"{bar.value:.2f}"
    return f"{bar.name}: {value} (bar {bar.limit:.2f}) {verdict}"


def to_json(report: Report, settings: dict[str, object]) -> str:
    """Return the report as one line of JSON, with the run's settings."""
    rows = {
        row.row: {
            "tokens_per_s": rounded(row.tokens_per_s),
            "ratio_to_off": rounded(row.ratio_to_off),
            "acceptance_length": rounded(row.acceptance_length),
            "draft_ms": rounded(row.draft_ms),
            "verify_ms": rounded(row.verify_ms),
            "overhead_ms": rounded(row.overhead_ms),
            "identical_to_off": row.is_identical,
            "num_compared": row.num_compared,
        }
        for row in report.rows
    }
    bars = bar_records(report.bars)
    return json.dumps({"benchmark": "one_stream", **settings, "rows": rows, "bars": bars})


def bar_records(bars: Sequence[Bar]) -> list[dict[str, Any]]:
    """Return bars as a report's JSON has them."""
    return [
        {"name": bar.name, "limit": bar.limit, "value": rounded(bar.value), "met": bar.is_met}
        for bar in bars
    ]


def rounded(value: Any) -> Any:
    """Return a JSON value with its floats, however deep, to three digits."""
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list) else value
