"""Engine groups in Prometheus' terms.

Every gateway reports every group, so with several gateways aggregate with ``max by (group)``. Useful
queries (``[5m]`` as wanted):
    pages short     dflash_pages_in_use / dflash_pages
    preemptions     rate(dflash_preemptions_total)
    a leak          dflash_pages_in_use > 0 while dflash_sequences_running == 0
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dflash_wire.gauges import GroupGauges
from gateway.scheduler_metrics import scheduler_metrics

GAUGES = {
    "num_running": ("dflash_sequences_running", "Sequences that hold pages."),
    "num_waiting": (
        "dflash_sequences_waiting",
        "Sequences without pages, preempted ones included.",
    ),
    "num_outstanding_tokens": (
        "dflash_outstanding_tokens",
        "Tokens to prefill and expected output of running and waiting sequences.",
    ),
    "num_pages": ("dflash_pages", "Pages of the engine group."),
    "num_held_pages": ("dflash_pages_in_use", "Pages of running sequences."),
    "num_idle_pages": ("dflash_pages_cached", "Free pages that still hold a cached prefix."),
}
COUNTERS = {
    "num_preemptions": (
        "dflash_preemptions",
        "Sequences that gave their pages up and began again.",
    ),
    "num_steps": ("dflash_steps", "Steps sent around the ring."),
    "num_failed_steps": ("dflash_failed_steps", "Steps that failed as a whole."),
    "num_guided_tokens": ("dflash_guided_tokens", "Tokens committed under a grammar."),
    "num_forced_tokens": (
        "dflash_forced_tokens",
        "Tokens committed under a grammar that left no alternative.",
    ),
    "num_written_drafts": (
        "dflash_written_drafts",
        "Accepted drafts that grammars had put into the drafter's places.",
    ),
}


class GroupCollector(Collector):
    """Reports the engine groups as they were last asked. Owner: the metrics; ``/metrics`` sets ``now``."""

    def __init__(self) -> None:
        self.now: Sequence[GroupGauges] = ()

    def collect(self) -> Iterable[Metric]:
        """Yield one family per field, a sample per group."""
        for field, (name, text) in GAUGES.items():
            yield self._fill(GaugeMetricFamily(name, text, labels=["group"]), field)
        for field, (name, text) in COUNTERS.items():
            yield self._fill(CounterMetricFamily(name, text, labels=["group"]), field)
        yield from scheduler_metrics(self.now)

    def _fill(
        self, family: GaugeMetricFamily | CounterMetricFamily, field: str
    ) -> GaugeMetricFamily | CounterMetricFamily:
        for group in self.now:
            family.add_metric([group.group], getattr(group, field))
        return family
