"""Prometheus metrics of one gateway, in a registry of its own.

Queries for what is derived, not counted (``[5m]`` as wanted):
    acceptance length  rate(dflash_committed_tokens_total) / rate(dflash_cycles_total)
    acceptance rate    sum by (drafter) (rate(dflash_accepted_drafts_total))
                       / rate(dflash_draft_tokens_total)
        Both are per drafter, the label of these counters; plain decoding is counted under ``none``.
    acceptance length by how the request began, ``hit`` (some of its prompt was cached) or ``miss``
        tau(p) = rate(dflash_prefix_cycle_tokens_total{prefix=p}) / rate(dflash_prefix_cycles_total{prefix=p})
        Alarm when tau("hit") / tau("miss") stays below 0.8: what cached pages hold for the drafter does not
        belong to their tokens. Only cycles with drafts count, so ``off`` does not blur it.
Cycles are counted when their chunk arrives, those of cancelled sequences too. One in which a stop
string ends the sequence counts with its tokens up to the one that completed the stop string.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dflash_wire.drafters import DEFAULT_DRAFTER
from dflash_wire.records import CycleStats
from gateway.cycle_totals import CycleTotals, DrafterTotals
from gateway.group_metrics import GroupCollector

Clock = Callable[[], float]

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TPOT_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class GatewayMetrics:
    """All metrics of one gateway. Owner: the app; endpoints report through its methods.

    Args:
        clock: seconds from any fixed point; replaced in tests.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self.registry = CollectorRegistry()
        self._requests = self._counter(
            "dflash_http_requests", "HTTP requests.", "endpoint", "status"
        )
        self._errors = self._counter("dflash_errors", "Errors sent to clients.", "code")
        self._prompt_tokens = self._counter("dflash_prompt_tokens", "Prompt tokens.")
        self._cached_tokens = self._counter(
            "dflash_cached_prompt_tokens", "Prompt tokens that came out of the prefix cache."
        )
        self._completion_tokens = self._counter("dflash_completion_tokens", "Output tokens.")
        self.cycles = CycleTotals()
        self.cycles.of(DEFAULT_DRAFTER)  # so that its counters show from the start
        self.registry.register(self.cycles)
        self._time_to_first_token = Histogram(
            "dflash_time_to_first_token_seconds",
            "From the request's arrival to its first committed token.",
            buckets=TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self._time_per_output_token = Histogram(
            "dflash_time_per_output_token_seconds",
            "Per sequence: first to last chunk, divided by the tokens after the first chunk.",
            buckets=TPOT_BUCKETS_S,
            registry=self.registry,
        )
        self.groups = GroupCollector()
        self.registry.register(self.groups)
        self.running = Gauge(
            "dflash_requests_running", "Sequences being generated.", registry=self.registry
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def render(self) -> bytes:
        """Return the registry in Prometheus' text format."""
        return generate_latest(self.registry)

    def count_request(self, endpoint: str, status: int) -> None:
        """Count one HTTP request under its route template and final status."""
        self._requests.labels(endpoint, str(status)).inc()

    def count_error(self, code: str) -> None:
        """Count one error that was sent to a client, before or inside a stream."""
        self._errors.labels(code).inc()

    def start_sequence(
        self, arrived: float, num_prompt_tokens: int, drafter: str = DEFAULT_DRAFTER
    ) -> SequenceMeter:
        """Begin measuring one sequence.

        Args:
            arrived: when its request arrived, on ``clock``.
            num_prompt_tokens: length of its prompt.
            drafter: who drafts for it; ``none`` if nobody does.
        """
        self.running.inc()
        self._prompt_tokens.inc(num_prompt_tokens)
        return SequenceMeter(self, arrived, self.cycles.of(drafter))

    def observe_cached(self, num_tokens: int) -> None:
        """Record how much of one sequence's prompt was cached."""
        self._cached_tokens.inc(num_tokens)

    def observe_first_token(self, seconds: float) -> None:
        """Record one sequence's time to first token."""
        self._time_to_first_token.observe(seconds)

    def observe_sequence(self, num_tokens: int, seconds_per_token: float | None) -> None:
        """Record a sequence's output; the time is None when one chunk held all of it."""
        self._completion_tokens.inc(num_tokens)
        if seconds_per_token is not None:
            self._time_per_output_token.observe(seconds_per_token)


class SequenceMeter:
    """Times one sequence. Owner: its generator, which must call ``finish`` exactly once."""

    def __init__(self, metrics: GatewayMetrics, arrived: float, cycles: DrafterTotals) -> None:
        self._metrics = metrics
        self._cycles = cycles
        self._arrived = arrived
        self._first_chunk: tuple[float, int] | None = None
        self._last_chunk_at = arrived
        self._num_tokens = 0
        self._is_hit = False

    def add_chunk(self, num_tokens: int, cycle: CycleStats | None) -> None:
        """Note that a chunk with ``num_tokens`` output tokens is here; ``cycle`` committed them."""
        if num_tokens == 0:
            return
        if cycle is not None:
            self._cycles.add(cycle, self._is_hit)
        now = self._metrics.clock()
        if self._first_chunk is None:
            self._first_chunk = (now, num_tokens)
            self._metrics.observe_first_token(now - self._arrived)
        self._last_chunk_at = now
        self._num_tokens += num_tokens

    def set_drafter(self, drafter: str) -> None:
        """Count its cycles under another drafter from now on; ``none`` if nobody drafts for it."""
        self._cycles = self._metrics.cycles.of(drafter)

    def add_cached(self, num_tokens: int) -> None:
        """Note that so many prompt tokens were cached."""
        self._is_hit = True
        self._metrics.observe_cached(num_tokens)

    def finish(self) -> None:
        """Record the sequence, however it ended."""
        self._metrics.running.dec()
        self._metrics.observe_sequence(self._num_tokens, self._seconds_per_token())

    def _seconds_per_token(self) -> float | None:
        if self._first_chunk is None:
            return None
        first_at, first_tokens = self._first_chunk
        later_tokens = self._num_tokens - first_tokens
        return (self._last_chunk_at - first_at) / later_tokens if later_tokens else None
