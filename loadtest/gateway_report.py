"""From cells of ``make bench-gateway`` to a table: CPU per 1,000 tokens, latency per block, per request."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from loadtest.bench_report import aligned_table, rounded
from loadtest.paced_client import RequestCell, StreamCell
from loadtest.timing import percentile

BARE, PROXY, HAPROXY = "bare", "proxy", "haproxy"
CPU_BAR, CPU_AIM = 3.0, 2.0
"""Goals for HAProxy mode: CPU over the bare app's."""


@dataclass(frozen=True)
class EdgeRow:
    """One edge; medians over repeats, times in milliseconds."""

    edge: str
    cpu_ms: float
    """CPU per 1,000 tokens, all serving processes, beyond what they use with nothing to do."""
    cpu_ratio: float
    """Median over the repeats of the ratio to the bare app within a repeat."""
    part_ms: dict[str, float]
    idle_ms_per_s: float
    """CPU of all of them with nothing to do: health checks, metrics, polling."""
    latency_p50_ms: float
    latency_p99_ms: float
    added_p50_ms: float
    """Median latency of a block over the bare app's in the same repeat."""
    added_p99_ms: float
    request_ms: float
    """Wall time of a request of one token with nothing else running."""
    request_cpu_ms: float


@dataclass(frozen=True)
class GatewayReport:
    """All rows, and what detokenizing takes of them."""

    rows: list[EdgeRow]
    detokenizing_ms: float
    """CPU per 1,000 tokens, measured alone."""

    def row(self, edge: str) -> EdgeRow | None:
        """Return the row of an edge, if it was measured."""
        return next((row for row in self.rows if row.edge == edge), None)


def cpu_ms(cell: StreamCell) -> dict[str, float]:
    """Return every part's CPU milliseconds per 1,000 tokens, without what it uses when idle."""
    return {
        part: (seconds - cell.idle_cpu_s[part] * cell.measured_s) * 1e6 / cell.num_tokens
        for part, seconds in cell.cpu_s.items()
    }


def evaluate(
    streams: Sequence[StreamCell], requests: Sequence[RequestCell], detokenizing_ms: float
) -> GatewayReport:
    """Summarize cells; every edge has as many as the bare app, by repeat in the same order."""
    bare = [cell for cell in streams if cell.edge == BARE]
    rows = []
    for edge in dict.fromkeys(cell.edge for cell in streams):
        mine = [cell for cell in streams if cell.edge == edge]
        short = [cell for cell in requests if cell.edge == edge]
        rows.append(_row(edge, mine, bare, short))
    return GatewayReport(rows, detokenizing_ms)


def _row(
    edge: str,
    cells: Sequence[StreamCell],
    bare: Sequence[StreamCell],
    requests: Sequence[RequestCell],
) -> EdgeRow:
    pairs = list(zip(cells, bare, strict=True))

    def total(cell: StreamCell) -> float:
        return sum(cpu_ms(cell).values())

    def latency(rank: float) -> Callable[[StreamCell], float]:
        return lambda cell: percentile(cell.latencies_s, rank) * 1e3

    p50, p99 = latency(50), latency(99)
    return EdgeRow(
        edge=edge,
        cpu_ms=median(map(total, cells)),
        cpu_ratio=median(total(mine) / total(theirs) for mine, theirs in pairs),
        part_ms={part: median(cpu_ms(cell)[part] for cell in cells) for part in cells[0].cpu_s},
        idle_ms_per_s=median(sum(cell.idle_cpu_s.values()) * 1e3 for cell in cells),
        latency_p50_ms=median(map(p50, cells)),
        latency_p99_ms=median(map(p99, cells)),
        added_p50_ms=median(p50(mine) - p50(theirs) for mine, theirs in pairs),
        added_p99_ms=median(p99(mine) - p99(theirs) for mine, theirs in pairs),
        request_ms=median(percentile(cell.latencies_s, 50) * 1e3 for cell in requests),
        request_cpu_ms=median(
            sum(cell.cpu_s.values()) * 1e3 / len(cell.latencies_s) for cell in requests
        ),
    )


def render_table(report: GatewayReport) -> str:
    """Return the table and what it says about the goals."""
    header = [
        "edge",
        "CPU ms/1000 tok",
        "x bare",
        "gateway",
        "proxy",
        "idle ms/s",
        "block p50 ms",
        "p99",
        "added p50",
        "p99",
        "request ms",
        "its CPU ms",
    ]
    lines = [
        [
            row.edge,
            f"{row.cpu_ms:.1f}",
            f"{row.cpu_ratio:.2f}",
            f"{row.part_ms['gateway']:.1f}",
            f"{row.part_ms['proxy']:.1f}" if "proxy" in row.part_ms else "–",
            f"{row.idle_ms_per_s:.1f}",
            f"{row.latency_p50_ms:.2f}",
            f"{row.latency_p99_ms:.2f}",
            f"{row.added_p50_ms:.2f}",
            f"{row.added_p99_ms:.2f}",
            f"{row.request_ms:.2f}",
            f"{row.request_cpu_ms:.2f}",
        ]
        for row in report.rows
    ]
    return "\n".join([aligned_table([header, *lines]), "", *_verdicts(report)])


def _verdicts(report: GatewayReport) -> list[str]:
    lines = []
    row = report.row(HAPROXY)
    if row is not None:
        verdict = "met" if row.cpu_ratio <= CPU_BAR else "MISSED"
        lines.append(
            f"CPU through HAProxy / bare app: {row.cpu_ratio:.2f} (bar {CPU_BAR:.2f}, "
            f"aim {CPU_AIM:.2f}) {verdict}"
        )
        share = report.detokenizing_ms / row.part_ms["gateway"]
        lines.append(
            f"detokenizing: {report.detokenizing_ms:.1f} ms of CPU per 1,000 tokens, "
            f"{100 * share:.0f} % of the gateway's"
        )
    return lines


def to_json(report: GatewayReport, settings: dict[str, object]) -> str:
    """Return the report as one line of JSON, with the run's settings."""
    row = report.row(HAPROXY)
    return json.dumps(
        {
            "benchmark": "gateway",
            **settings,
            "bar_met": None if row is None else row.cpu_ratio <= CPU_BAR,
            "detokenizing_ms": report.detokenizing_ms,
            "rows": rounded([asdict(row) for row in report.rows]),
        }
    )
