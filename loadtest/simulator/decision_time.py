"""How long the block scheduler takes to decide: ``python -m loadtest.simulator.decision_time``.

Plays simulated cells and measures CPU time of the deciding thread, in milliseconds per decision, after a
quarter of the steps. Prints a table; exits with 1 if a median misses its bar.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from statistics import mean, median, quantiles
from typing import NamedTuple

from gateway.coordinator.block_scheduler.records import Decision, RowState, StepLoad, StepOutcome
from loadtest.simulator.costs import COSTS
from loadtest.simulator.loop import Phase, Policy, Scenario, simulate
from loadtest.simulator.matrix import scheduler_of
from loadtest.simulator.worlds import TRAFFICS

BARS_MS = {1: 0.3, 8: 0.3, 32: 0.3, 128: 1.0, 256: 1.0}
"""Most milliseconds by rows."""
NUM_STEPS = 400


class DecisionTime(NamedTuple):
    """Milliseconds per step."""

    num_rows: int
    median_ms: float
    mean_ms: float
    p95_ms: float
    observe_ms: float


class Timed:
    """A policy whose calls are timed. Owner: one run."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.decide_ms: list[float] = []
        self.observe_ms: list[float] = []

    def decide(self, rows: Sequence[RowState], load: StepLoad) -> Decision:
        """See ``loop.Policy``."""
        began = time.thread_time()
        decision = self._policy.decide(rows, load)
        self.decide_ms.append(1e3 * (time.thread_time() - began))
        return decision

    def observe(self, outcome: StepOutcome) -> None:
        """See ``loop.Policy``."""
        began = time.thread_time()
        self._policy.observe(outcome)
        self.observe_ms.append(1e3 * (time.thread_time() - began))

    def forget(self, seq_id: int) -> None:
        """See ``loop.Policy``."""
        self._policy.forget(seq_id)


def measure(num_rows: int, num_steps: int = NUM_STEPS) -> DecisionTime:
    """Measure mixed traffic on the memory-bound machine, where every step speculates."""
    cost = COSTS["memory-bound"]
    timed = Timed(scheduler_of(cost, 0))
    simulate(timed, Scenario((Phase(0, TRAFFICS["mixed"], num_rows),), cost, num_steps))
    decide_ms = timed.decide_ms[num_steps // 4 :]
    return DecisionTime(
        num_rows,
        median(decide_ms),
        mean(decide_ms),
        quantiles(decide_ms, n=20)[-1],
        median(timed.observe_ms[num_steps // 4 :]),
    )


def main() -> int:
    """Measure, print, and return the exit status."""
    print("rows  median    mean     p95  observe    bar   (ms)")
    is_met = True
    for num_rows, most in BARS_MS.items():
        found = measure(num_rows)
        values = "".join(f"{value:>8.3f}" for value in found[1:])
        print(f"{num_rows:>4}{values}{most:>8.1f}")
        is_met &= found.median_ms <= most
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
