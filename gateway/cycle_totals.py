"""What the cycles of all sequences add up to, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from dflash_wire.records import CycleStats


class DrafterTotals:
    """Sums over one drafter's cycles. Owner: the gateway's event loop."""

    def __init__(self) -> None:
        self.num_cycles = 0
        self.num_committed = 0
        self.num_draft_tokens = 0
        self.draft_ms = 0.0
        self.verify_ms = 0.0
        self.overhead_ms = 0.0
        self.cycles_by_accepted: list[int] = [0]
        """``[n]``: cycles with exactly ``n`` accepted drafts."""
        self.num_drafted_cycles = {True: 0, False: 0}
        self.num_drafted_tokens = {True: 0, False: 0}
        """Cycles with drafts, and the tokens they committed, by whether some of the prompt was cached."""

    def add(self, cycle: CycleStats, is_hit: bool) -> None:
        """Add one cycle of any sequence; ``is_hit``: its prompt began with cached tokens."""
        self.num_cycles += 1
        self.num_committed += cycle.num_committed
        self.num_draft_tokens += cycle.num_draft_tokens
        self.draft_ms += cycle.draft_ms
        self.verify_ms += cycle.verify_ms
        self.overhead_ms += cycle.overhead_ms
        num_accepted_drafts = cycle.num_accepted_drafts
        missing = num_accepted_drafts + 1 - len(self.cycles_by_accepted)
        if missing > 0:
            self.cycles_by_accepted += [0] * missing
        self.cycles_by_accepted[num_accepted_drafts] += 1
        if cycle.num_draft_tokens:
            self.num_drafted_cycles[is_hit] += 1
            self.num_drafted_tokens[is_hit] += cycle.num_committed


_SUMS: tuple[tuple[str, str, Callable[[DrafterTotals], float]], ...] = (
    ("dflash_cycles", "Draft-verify-commit cycles.", lambda t: t.num_cycles),
    (
        "dflash_committed_tokens",
        "Tokens committed by cycles, bonus included.",
        lambda t: t.num_committed,
    ),
    ("dflash_draft_tokens", "Draft tokens verified.", lambda t: t.num_draft_tokens),
    ("dflash_draft_seconds", "Seconds of cycles spent on draft.", lambda t: t.draft_ms / 1e3),
    ("dflash_verify_seconds", "Seconds of cycles spent on verify.", lambda t: t.verify_ms / 1e3),
    (
        "dflash_overhead_seconds",
        "Seconds of cycles spent on overhead.",
        lambda t: t.overhead_ms / 1e3,
    ),
)


class CycleTotals(Collector):
    """The totals of every drafter, as counters of a registry. Owner: the gateway's event loop.

    Plain numbers that are read when somebody asks: a ``Counter`` takes a lock for every increment, and
    a cycle has six of them and one more per accepted draft.
    """

    def __init__(self) -> None:
        self._drafters: dict[str, DrafterTotals] = {}

    def of(self, drafter: str) -> DrafterTotals:
        """The totals of one drafter, from zero when it is new. Mutates."""
        return self._drafters.setdefault(drafter, DrafterTotals())

    def collect(self) -> Iterator[Metric]:
        """Yield the counters as they are now; the registry calls this."""
        for name, text, value in _SUMS:
            family = CounterMetricFamily(name, text, labels=["drafter"])
            for drafter, totals in self._drafters.items():
                family.add_metric([drafter], value(totals))
            yield family
        yield self._accepted_drafts()
        yield from self._by_prefix()

    def _accepted_drafts(self) -> Metric:
        family = CounterMetricFamily(
            "dflash_accepted_drafts",
            "Accepted drafts by position in the block.",
            labels=["drafter", "position"],
        )
        for drafter, totals in self._drafters.items():
            for position in range(1, len(totals.cycles_by_accepted)):
                num_accepted_drafts = sum(totals.cycles_by_accepted[position:])
                family.add_metric([drafter, str(position)], num_accepted_drafts)
        return family

    def _by_prefix(self) -> Iterator[Metric]:
        cycles = CounterMetricFamily(
            "dflash_prefix_cycles",
            "Cycles with drafts, by how the prompt began.",
            labels=["drafter", "prefix"],
        )
        tokens = CounterMetricFamily(
            "dflash_prefix_cycle_tokens",
            "Tokens that those cycles committed.",
            labels=["drafter", "prefix"],
        )
        for drafter, totals in self._drafters.items():
            for is_hit, prefix in ((True, "hit"), (False, "miss")):
                cycles.add_metric([drafter, prefix], totals.num_drafted_cycles[is_hit])
                tokens.add_metric([drafter, prefix], totals.num_drafted_tokens[is_hit])
        yield cycles
        yield tokens
