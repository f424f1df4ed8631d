from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from dflash_wire.records import CycleStats
from gateway.cycle_totals import CycleTotals


def test_sums_and_positions() -> None:
    registry, totals = CollectorRegistry(), CycleTotals()
    registry.register(totals)

    def sample(name: str, drafter: str = "a", **labels: str) -> float | None:
        return registry.get_sample_value(name, {"drafter": drafter, **labels})

    mine = totals.of("a")
    assert sample("dflash_cycles_total") == 0
    assert sample("dflash_accepted_drafts_total", position="1") is None
    mine.add(CycleStats(7, 2, 3, 1.0, 2.0, 0.5), is_hit=False)
    mine.add(CycleStats(7, 0, 1, 1.0, 2.0, 0.5), is_hit=True)
    mine.add(CycleStats(3, 3, 3, 1.0, 2.0, 0.5), is_hit=False)
    totals.of("b").add(CycleStats(0, 0, 1, 0.0, 2.0, 0.5), is_hit=True)
    assert totals.of("a") is mine
    accepted_at = [
        sample("dflash_accepted_drafts_total", position=str(position)) for position in (1, 2, 3, 4)
    ]
    assert accepted_at == [2, 2, 1, None]
    assert sample("dflash_committed_tokens_total") == 7
    assert sample("dflash_draft_tokens_total") == 17
    assert sample("dflash_verify_seconds_total") == 0.006
    assert sample("dflash_prefix_cycles_total", prefix="miss") == 2
    assert sample("dflash_prefix_cycle_tokens_total", prefix="hit") == 1
    assert sample("dflash_cycles_total", "b") == 1
    assert sample("dflash_prefix_cycles_total", "b", prefix="hit") == 0, "it had no drafts"
    assert b"# TYPE dflash_cycles_total counter" in generate_latest(registry)
