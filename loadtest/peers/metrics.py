"""Acceptance length from the counters that vLLM and llama.cpp publish for Prometheus."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.error import URLError
from urllib.request import urlopen

NUM_DRAFTS = "spec_decode_num_drafts_total"
NUM_ACCEPTED = "spec_decode_num_accepted_tokens_total"


@dataclass(frozen=True)
class DraftCounters:
    """Totals since the server started."""

    num_drafts: float
    """Draft blocks verified."""
    num_accepted_drafts: float

    def acceptance_length_since(self, earlier: DraftCounters) -> float | None:
        """Committed tokens per cycle between two readings, bonus included; None without cycles."""
        num_drafts = self.num_drafts - earlier.num_drafts
        if num_drafts <= 0:
            return None
        return 1.0 + (self.num_accepted_drafts - earlier.num_accepted_drafts) / num_drafts


def parse_counters(text: str) -> DraftCounters | None:
    """Read the text format; None when there are no counters of drafts. Series are summed."""
    totals: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#") or not line.strip():
            continue
        series, _, value = line.rpartition(" ")
        name = series.partition("{")[0].rpartition(":")[2]
        if name in (NUM_DRAFTS, NUM_ACCEPTED):
            totals[name] = totals.get(name, 0.0) + float(value)
    if len(totals) < 2:
        return None
    return DraftCounters(totals[NUM_DRAFTS], totals[NUM_ACCEPTED])


def read_counters(base_url: str) -> DraftCounters | None:
    """Counters now; None when the server publishes none."""
    try:
        with urlopen(f"{base_url}/metrics", timeout=30) as response:
            return parse_counters(response.read().decode())
    except (URLError, OSError):
        return None
