"""Summary of a load run: exact percentiles per metric as a table, then one line of JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from loadtest.timing import StreamTiming, percentile

RANKS = (50, 90, 99)


@dataclass(frozen=True)
class Sample:
    """One finished request."""

    prompt_id: str
    timing: StreamTiming
    acceptance_length: float | None = None


@dataclass
class LoadRun:
    """All requests of a run. Owner: the load generator's main greenlet; users append to it."""

    samples: list[Sample] = field(default_factory=list)
    num_failures: int = 0

    def summary(self) -> dict[str, object]:
        """Counts and percentiles; milliseconds for times. Does not mutate."""
        timings = [sample.timing for sample in self.samples]
        lengths = [s.acceptance_length for s in self.samples if s.acceptance_length is not None]
        return {
            "num_requests": len(timings),
            "num_failures": self.num_failures,
            "completion_tokens": sum(t.completion_tokens for t in timings),
            "ttft_ms": _spread([t.ttft_s * 1e3 for t in timings]),
            "tpot_ms": _spread([t.tpot_s * 1e3 for t in timings if t.tpot_s is not None]),
            "e2e_ms": _spread([t.e2e_s * 1e3 for t in timings]),
            "tokens_per_s": _spread([t.tokens_per_s for t in timings]),
            "acceptance_length": _spread(lengths),
        }


def render(summary: dict[str, object]) -> str:
    """Return the table and the JSON line of ``LoadRun.summary``."""
    lines = [f"{'':18}" + "".join(f"{'p' + str(rank):>10}" for rank in RANKS)]
    for name, value in summary.items():
        if isinstance(value, dict):
            lines.append(f"{name:18}" + "".join(f"{value[f'p{rank}']:10.2f}" for rank in RANKS))
    return "\n".join([*lines, json.dumps(summary)])


def sample_row(sample: Sample) -> str:
    """Return one request as a JSON line, for files of raw rows."""
    row = {"prompt_id": sample.prompt_id, **asdict(sample.timing)}
    return json.dumps({**row, "acceptance_length": sample.acceptance_length})


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {f"p{rank}": round(percentile(values, rank), 3) for rank in RANKS}
