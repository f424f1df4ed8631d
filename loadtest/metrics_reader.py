"""A server's metrics, read over HTTP."""

from __future__ import annotations

import time
from collections import defaultdict
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from loadtest.processes import BenchError

BUSY = (
    "dflash_requests_running",
    "dflash_sequences_running",
    "dflash_sequences_waiting",
    "dflash_pages_in_use",
)
"""Gauges that are zero when nothing is going on."""
POLL_S = 0.5


class MetricsReader:
    """Reads ``/metrics``, every series of a name added up."""

    def __init__(self, base_url: str) -> None:
        self._url = f"{base_url}/metrics"

    def read(self) -> dict[str, float]:
        """Return the sums by sample name.

        Raises:
            BenchError: no answer.
        """
        try:
            with urlopen(self._url, timeout=30) as response:
                text = response.read().decode()
        except OSError as error:
            raise BenchError(f"{self._url}: {error}") from error
        sums: dict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] += sample.value
        return dict(sums)

    def wait_idle(self, timeout_s: float) -> dict[str, float]:
        """Return the metrics once nothing is busy, or as they are when the time is over.

        Raises:
            BenchError: no answer, or the server reports no engine group.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            now = self.read()
            if now.get("dflash_pages", 0) == 0:
                if time.monotonic() > deadline:
                    raise BenchError("the server reports no engine group")
            elif all(now[name] == 0 for name in BUSY) or time.monotonic() > deadline:
                return now
            time.sleep(POLL_S)
