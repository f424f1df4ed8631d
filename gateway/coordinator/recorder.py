"""When what happened in the latest steps: the coordinator's flight recorder."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from dflash_wire.records import StepRecord, StepResult
from gateway.coordinator.commit import num_verified_positions
from gateway.coordinator.planner import PlannedStep
from gateway.coordinator.sequence import Sequence

RECORDED_STEPS = 2048


class Flight(NamedTuple):
    """A step on its way around the ring; times in seconds."""

    planned: PlannedStep
    started: float
    """When its planning began."""
    sent: float


def cycle_began(sequence: Sequence, flight: Flight) -> float:
    """When the cycle began that a landed step gives a sequence, in seconds.

    Consecutive cycles follow each other without a gap, so that publishing counts as well; one after a gap
    begins with its planning.
    """
    plan, last = flight.planned.plan, sequence.last_cycle
    if last is not None and plan.step_id - last.step_id <= plan.num_cohorts:
        return last.committed_at
    return flight.started


def step_record(
    flight: Flight, result: StepResult, landed_s: float, published_s: float
) -> StepRecord:
    """Put together what is known of a good step."""
    plan = flight.planned.plan
    return StepRecord(
        step_id=plan.step_id,
        num_cohorts=plan.num_cohorts,
        num_rows=len(plan.rows),
        num_positions=num_verified_positions(plan, result),
        num_prefill_positions=sum(row.num_positions for row in plan.rows if row.is_prefill),
        num_committed=sum(map(len, result.committed_token_ids)),
        planning_s=flight.started,
        sent_s=flight.sent,
        draft_began_s=result.draft_began_s,
        draft_ms=result.draft_ms,
        verify_began_s=result.verify_began_s,
        verify_ms=result.verify_ms,
        landed_s=landed_s,
        published_s=published_s,
    )


class FlightRecorder:
    """The records of the latest steps.

    Owner: the coordinator; the driver thread adds, any thread may copy.
    """

    def __init__(self, most_steps: int = RECORDED_STEPS) -> None:
        self._records: deque[StepRecord] = deque(maxlen=most_steps)

    def add(self, record: StepRecord) -> None:
        """Add a step; the oldest one goes. Mutates."""
        self._records.append(record)

    def copy(self) -> list[StepRecord]:
        """Return all records, oldest first."""
        # One call into C, so the driver cannot add one meanwhile.
        return list(self._records)
