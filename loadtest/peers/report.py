"""From cells of all servers to one table and the bars. Pure: no clock, no network, no process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from loadtest.bench_report import PLAIN, Bar, aligned_table, bar_line, rounded
from loadtest.closed_loop import Answer
from loadtest.peers.setups import LOOP, OURS
from loadtest.peers.visits import CellResult
from loadtest.timing import percentile

REFERENCE_ROW = f"{OURS}/{PLAIN}"
"""Whose texts the others' are compared with."""
VLLM_BAR = 1.0
LOOP_BAR = 2.0


@dataclass(frozen=True)
class PeerRow:
    """One row at one level. Times in milliseconds; None where a server does not tell."""

    num_streams: int
    row: str
    tokens_per_s: float
    """Median over the rounds."""
    ttft_p50_ms: float | None
    tpot_p50_ms: float | None
    acceptance_length: float | None
    same_share: float | None
    """Share of the compared answers whose text is that of our plain decoding."""
    num_compared: int
    client_share: float
    num_answers: int


@dataclass(frozen=True)
class Comparison:
    """Our best row over another's best row at one level: median over rounds of the ratio in a round."""

    num_streams: int
    ours: str
    theirs: str
    ratio: float


@dataclass(frozen=True)
class PeerReport:
    """Rows by level, comparisons, bars, and what could not be measured."""

    rows: list[PeerRow]
    comparisons: list[Comparison]
    bars: list[Bar]
    failures: Mapping[str, str]
    """Setup or peer -> reason."""


def evaluate(results: Sequence[CellResult], failures: Mapping[str, str]) -> PeerReport:
    """Summarize all rounds. A row may lack rounds in which its server failed."""
    texts = reference_texts(results)
    grouped: dict[tuple[int, str], list[CellResult]] = {}
    for result in results:
        grouped.setdefault((result.cell.num_streams, result.row), []).append(result)
    levels = sorted({level for level, _ in grouped})
    rows = [
        _row(cells, texts)
        for level in levels
        for (own, _), cells in grouped.items()
        if own == level
    ]
    comparisons = []
    for level in levels:
        rates = {row: _rates(cells) for (own, row), cells in grouped.items() if own == level}
        for prefix in ("vllm/", "llama/", f"{LOOP}/"):
            comparisons += _compare(level, rates, prefix)
    return PeerReport(rows, comparisons, _bars(levels, grouped), failures)


def reference_texts(results: Sequence[CellResult]) -> dict[str, str]:
    """Prompt id -> text of our plain decoding, from its cells."""
    return {
        answer.prompt_id: answer.text
        for result in results
        if result.row == REFERENCE_ROW
        for answer in result.cell.answers
    }


def _row(results: Sequence[CellResult], texts: Mapping[str, str]) -> PeerRow:
    answers = [answer for result in results for answer in result.cell.answers]
    streamed = [answer for answer in answers if answer.num_first > 0]
    tpots = [1e3 * tpot for answer in answers if (tpot := answer.tpot_s) is not None]
    lengths = [r.acceptance_length for r in results if r.acceptance_length is not None]
    compared = [a for a in answers if a.prompt_id in texts]
    return PeerRow(
        num_streams=results[0].cell.num_streams,
        row=results[0].row,
        tokens_per_s=median(result.cell.tokens_per_s for result in results),
        ttft_p50_ms=_median_or_none([1e3 * answer.ttft_s for answer in streamed]),
        tpot_p50_ms=_median_or_none(tpots),
        acceptance_length=_median_or_none(lengths),
        same_share=_same_share(compared, texts),
        num_compared=len(compared),
        client_share=median(result.client_share for result in results),
        num_answers=len(answers),
    )


def _median_or_none(values: Sequence[float]) -> float | None:
    return percentile(values, 50) if values else None


def _same_share(answers: Sequence[Answer], texts: Mapping[str, str]) -> float | None:
    if not answers:
        return None
    return sum(answer.text == texts[answer.prompt_id] for answer in answers) / len(answers)


def _rates(results: Sequence[CellResult]) -> dict[int, float]:
    """Round -> tokens per second."""
    return {result.round: result.cell.tokens_per_s for result in results}


def _best(rates: Mapping[str, Mapping[int, float]], prefix: str, part: str = "") -> str | None:
    names = [name for name in rates if name.startswith(prefix) and part in name]
    return max(names, key=lambda name: median(rates[name].values()), default=None)


def _compare(
    level: int, rates: Mapping[str, Mapping[int, float]], prefix: str, part: str = ""
) -> list[Comparison]:
    """One comparison, or none where a side or a common round is missing."""
    ours, theirs = _best(rates, f"{OURS}/"), _best(rates, prefix, part)
    if ours is None or theirs is None:
        return []
    common = rates[ours].keys() & rates[theirs].keys()
    ratios = [rates[ours][number] / rates[theirs][number] for number in common]
    return [Comparison(level, ours, theirs, median(ratios))] if ratios else []


def _bars(
    levels: Sequence[int], grouped: Mapping[tuple[int, str], Sequence[CellResult]]
) -> list[Bar]:
    bars = []
    for level in levels:
        rates = {row: _rates(cells) for (own, row), cells in grouped.items() if own == level}
        found = _compare(level, rates, "vllm/", "/dflash:")
        bars.append(_bar(f"best of ours / vLLM's DFlash at {_streams(level)}", VLLM_BAR, found))
        if level == 1:
            found = _compare(level, rates, f"{LOOP}/")
            bars.append(_bar(f"best of ours / dflash package at {_streams(1)}", LOOP_BAR, found))
    return bars


def _streams(level: int) -> str:
    return "1 stream" if level == 1 else f"{level} streams"


def _bar(name: str, limit: float, found: Sequence[Comparison]) -> Bar:
    if not found:
        return Bar(name, limit, None)
    return Bar(f"{name} ({found[0].ours} / {found[0].theirs})", limit, found[0].ratio)


def render_table(report: PeerReport) -> str:
    """Return the table, comparisons, bars and failures as text."""
    header = [
        *("row", "streams", "tokens/s", "TTFT p50 ms", "ms/token p50", "tau"),
        *("= ours/off", "client CPU", "answers"),
    ]
    lines = [header, *(_cells(row) for row in report.rows)]
    parts = [aligned_table(lines), ""]
    parts += [
        f"at {_streams(c.num_streams)} {c.ours} / {c.theirs}: {c.ratio:.2f}"
        for c in report.comparisons
    ]
    parts += map(bar_line, report.bars)
    parts += [f"not measured: {name}: {reason}" for name, reason in report.failures.items()]
    return "\n".join(parts)


def _cells(row: PeerRow) -> list[str]:
    return [
        row.row,
        str(row.num_streams),
        f"{row.tokens_per_s:.0f}",
        _number(row.ttft_p50_ms, 0),
        _number(row.tpot_p50_ms),
        _number(row.acceptance_length),
        "–" if row.same_share is None else f"{row.same_share:.1%}",
        f"{row.client_share:.0%}",
        str(row.num_answers),
    ]


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def to_json(report: PeerReport, settings: Mapping[str, object]) -> str:
    """Return the report as one line of JSON, with the run's settings."""
    return json.dumps(
        {
            "benchmark": "peers",
            **settings,
            "rows": rounded([asdict(row) for row in report.rows]),
            "comparisons": rounded([asdict(c) for c in report.comparisons]),
            "bars": rounded([{**asdict(bar), "met": bar.is_met} for bar in report.bars]),
            "not_measured": dict(report.failures),
        }
    )
