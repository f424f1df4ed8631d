"""What must hold for the policy that is judged, and what its runs gave."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from typing import NamedTuple

from loadtest.simulator.changes import Recovery
from loadtest.simulator.matrix import FIXED, CellResult

LEAST_OF_BEST = 0.97
LEAST_OF_OFF = 0.99
MOST_RECOVERY_STEPS = 100
MOST_SWITCHES_PER_S = 1.0


class Bar(NamedTuple):
    """One condition."""

    name: str
    is_met: bool
    found: str


def geometric_means(results: Sequence[CellResult]) -> dict[str, float]:
    """Return the geometric mean over cells of each policy's speed-up over plain decoding."""
    names = results[0].rates
    return {
        name: exp(sum(log(result.share(name, "off")) for result in results) / len(results))
        for name in names
    }


def cell_bars(policy: str, results: Sequence[CellResult]) -> list[Bar]:
    """Judge ``policy`` by the matrix."""
    means = geometric_means(results)
    best_single = max(FIXED, key=means.__getitem__)
    is_above = means[policy] > means[best_single]
    above = f"{means[policy]:.3f} against {means[best_single]:.3f} of {best_single}"
    return [
        _least("of the best static width", LEAST_OF_BEST, policy, results, None),
        _least("of off", LEAST_OF_OFF, policy, results, "off"),
        Bar("above the best single static width", is_above, above),
        _calm(policy, results),
    ]


def change_bar(policy: str, recoveries: Sequence[Recovery]) -> Bar:
    """Judge ``policy`` by its slowest recovery."""
    mine = [recovery for recovery in recoveries if recovery.policy == policy]
    slowest = max(mine, key=lambda recovery: recovery.num_steps)
    num_slow = sum(recovery.num_steps > MOST_RECOVERY_STEPS for recovery in mine)
    return Bar(
        f"recovery within {MOST_RECOVERY_STEPS} steps",
        num_slow == 0,
        f"at most {slowest.num_steps} ({slowest.cost}, {slowest.change}); {num_slow} slower of {len(mine)}",
    )


def cell_name(result: CellResult) -> str:
    """Return a cell's name for people."""
    cost, traffic, num_streams = result.cell
    return f"{cost.name}, {traffic.name} at {num_streams}"


def _least(
    what: str, least: float, policy: str, results: Sequence[CellResult], of: str | None
) -> Bar:
    shares = [(result.share(policy, of or result.best_static), result) for result in results]
    share, worst = min(shares, key=lambda pair: pair[0])
    num_below = sum(share < least for share, _ in shares)
    found = f"at least {share:.3f} ({cell_name(worst)}); {num_below} below of {len(shares)}"
    return Bar(f"{least:.0%} {what} everywhere", num_below == 0, found)


def _calm(policy: str, results: Sequence[CellResult]) -> Bar:
    worst = max(results, key=lambda result: result.rates[policy].switches_per_s)
    rate = worst.rates[policy].switches_per_s
    num_above = sum(r.rates[policy].switches_per_s > MOST_SWITCHES_PER_S for r in results)
    found = f"at most {rate:.2f} ({cell_name(worst)}); {num_above} above of {len(results)}"
    return Bar(f"{MOST_SWITCHES_PER_S:g} switch per second", num_above == 0, found)
