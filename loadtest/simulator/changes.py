"""Changes that a policy must recover from: traffic, load, the drafter, and a cold start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from loadtest.simulator.costs import ServedCost
from loadtest.simulator.loop import Drafter, Phase, Scenario, simulate
from loadtest.simulator.matrix import POLICIES
from loadtest.simulator.worlds import TRAFFICS

PHASE_STEPS = 300


class Recovery(NamedTuple):
    """How one policy took one change."""

    policy: str
    cost: str
    change: str
    num_steps: int
    """Until a window of 16 steps gives 95 % of the best static width; ``PHASE_STEPS`` if it never did."""
    share: float
    """Of the best static width's throughput, over the whole phase."""


class Change(NamedTuple):
    """What changes, in phases of ``PHASE_STEPS`` steps with a name each."""

    names: tuple[str, ...]
    phases: tuple[Phase, ...]


def changes() -> Iterator[Change]:
    """Yield all changes; the first phase of each is a cold start."""
    code, prose, math, mixed = (TRAFFICS[name] for name in ("code", "prose", "math", "mixed"))
    for num_streams in (8, 32):
        names = [f"{what} at {num_streams}" for what in ("cold, code", "to prose", "to code")]
        yield _change(names, *(Phase(0, traffic, num_streams) for traffic in (code, prose, code)))
    loads = ["cold, mixed at 1", "1 to 32 streams", "32 to 1 streams", "1 to 128 streams"]
    yield _change(loads, *(Phase(0, mixed, num_streams) for num_streams in (1, 32, 1, 128)))
    for drafter in (Drafter.LOST, Drafter.STALE):
        names = ["cold, math at 8", f"drafter {drafter.value}", f"drafter no more {drafter.value}"]
        states = (Drafter.UP, drafter, Drafter.UP)
        yield _change(names, *(Phase(0, math, 8, state) for state in states))


def run_changes(policy: str, cost: ServedCost, seed: int) -> list[Recovery]:
    """Play all changes against one policy on one machine."""
    return [
        recovery for change in changes() for recovery in _run_change(policy, cost, change, seed)
    ]


def _change(names: Sequence[str], *phases: Phase) -> Change:
    starts = range(0, PHASE_STEPS * len(phases), PHASE_STEPS)
    placed = (
        Phase(start, phase.traffic, phase.num_streams, phase.drafter)
        for start, phase in zip(starts, phases, strict=True)
    )
    return Change(tuple(names), tuple(placed))


def _run_change(policy: str, cost: ServedCost, change: Change, seed: int) -> list[Recovery]:
    max_steps = PHASE_STEPS * len(change.phases)
    scenario = Scenario(change.phases, cost, max_steps, seed=seed, has_best_rate=True)
    record = simulate(POLICIES[policy](cost, seed), scenario)
    found = []
    for name, phase in zip(change.names, change.phases, strict=True):
        start, end = phase.start_step, phase.start_step + PHASE_STEPS
        num_steps = record.recovery_steps(start, end)
        best = float((record.best_rate * record.expected_ms)[start:end].sum())
        share = float(record.expected_tokens[start:end].sum()) / best
        found.append(Recovery(policy, cost.name, name, num_steps, share))
    return found
