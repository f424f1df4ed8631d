"""When what happened in the latest steps: the coordinator's flight recorder."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

RECORDED_STEPS = 2048


class StepRecord(NamedTuple):
    """One good step. Times in seconds of the monotonic clock that all processes of a machine share."""

    step_id: int
    num_cohorts: int
    num_rows: int
    num_positions: int
    num_prefill_positions: int
    num_committed: int
    """Tokens of the step's rows, not clipped."""
    planning_s: float
    sent_s: float
    draft_began_s: float
    """0.0 when the step went around the drafter."""
    draft_ms: float
    verify_began_s: float
    verify_ms: float
    landed_s: float
    published_s: float


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
        while True:
            try:
                return list(self._records)
            except RuntimeError:  # the driver added one meanwhile
                continue
