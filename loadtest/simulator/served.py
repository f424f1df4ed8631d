"""The block scheduler as it is served: it learns of a step, and chooses ahead, while the next one runs."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.coordinator.block_scheduler.records import Decision, RowState, StepLoad, StepOutcome
from gateway.coordinator.block_scheduler.scheduler import BlockScheduler


class ServedScheduler:
    """Puts lessons off until the next decision is made, as the coordinator does. Owner: one run.

    Args:
        scheduler: decides and learns.
    """

    def __init__(self, scheduler: BlockScheduler) -> None:
        self._scheduler = scheduler
        self._lessons: list[StepOutcome | int] = []

    def decide(self, rows: Sequence[RowState], load: StepLoad) -> Decision:
        """See ``loop.Policy``; learns afterwards, and prepares."""
        decision = self._scheduler.decide(rows, load)
        lessons, self._lessons = self._lessons, []
        for lesson in lessons:
            if isinstance(lesson, StepOutcome):
                self._scheduler.observe(lesson)
            else:
                self._scheduler.forget(lesson)
        if lessons:
            self._scheduler.prepare()
        return decision

    def observe(self, outcome: StepOutcome) -> None:
        """See ``loop.Policy``. Mutates."""
        self._lessons.append(outcome)

    def forget(self, seq_id: int) -> None:
        """See ``loop.Policy``. Mutates."""
        self._lessons.append(seq_id)
