"""What the cycles of all sequences add up to, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from dflash_wire.records import CycleStats


class CycleTotals(Collector):
    """Sums over cycles, as counters of a registry. Owner: the gateway's event loop.

    Plain numbers that are read when somebody asks: a ``Counter`` takes a lock for every increment, and
    a cycle has six of them and one more per accepted draft.
    """

    def __init__(self) -> None:
        self._num_cycles = 0
        self._num_committed = 0
        self._num_draft_tokens = 0
        self._draft_ms = 0.0
        self._verify_ms = 0.0
        self._overhead_ms = 0.0
        self._cycles_by_accepted: list[int] = [0]
        """``[n]``: cycles with exactly ``n`` accepted drafts."""
        self._by_prefix = {True: [0, 0], False: [0, 0]}
        """Cycles with drafts and their tokens, by whether the prompt began with cached tokens."""

    def add(self, cycle: CycleStats, is_hit: bool) -> None:
        """Add one cycle of any sequence; ``is_hit``: its prompt began with cached tokens."""
        self._num_cycles += 1
        self._num_committed += cycle.num_committed
        self._num_draft_tokens += cycle.num_draft_tokens
        self._draft_ms += cycle.draft_ms
        self._verify_ms += cycle.verify_ms
        self._overhead_ms += cycle.overhead_ms
        num_accepted_drafts = cycle.num_accepted_drafts
        missing = num_accepted_drafts + 1 - len(self._cycles_by_accepted)
        if missing > 0:
            self._cycles_by_accepted += [0] * missing
        self._cycles_by_accepted[num_accepted_drafts] += 1
        if cycle.num_draft_tokens:
            sums = self._by_prefix[is_hit]
            sums[0] += 1
            sums[1] += cycle.num_committed

    def collect(self) -> Iterator[Metric]:
        """Yield the counters as they are now; the registry calls this."""
        yield CounterMetricFamily(
            "dflash_cycles", "Draft-verify-commit cycles.", value=self._num_cycles
        )
        yield CounterMetricFamily(
            "dflash_committed_tokens",
            "Tokens committed by cycles, bonus included.",
            value=self._num_committed,
        )
        yield CounterMetricFamily(
            "dflash_draft_tokens", "Draft tokens verified.", value=self._num_draft_tokens
        )
        accepted_drafts = CounterMetricFamily(
            "dflash_accepted_drafts",
            "Accepted drafts by position in the block.",
            labels=["position"],
        )
        for position in range(1, len(self._cycles_by_accepted)):
            accepted_drafts.add_metric([str(position)], sum(self._cycles_by_accepted[position:]))
        yield accepted_drafts
        for part, ms in (
            ("draft", self._draft_ms),
            ("verify", self._verify_ms),
            ("overhead", self._overhead_ms),
        ):
            yield CounterMetricFamily(
                f"dflash_{part}_seconds", f"Seconds of cycles spent on {part}.", value=ms / 1000
            )
        for index, name, text in (
            (0, "dflash_prefix_cycles", "Cycles with drafts, by how the prompt began."),
            (1, "dflash_prefix_cycle_tokens", "Tokens that those cycles committed."),
        ):
            family = CounterMetricFamily(name, text, labels=["prefix"])
            for is_hit, label in ((True, "hit"), (False, "miss")):
                family.add_metric([label], self._by_prefix[is_hit][index])
            yield family
