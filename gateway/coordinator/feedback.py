"""What the block scheduler is told of a landed step."""

from __future__ import annotations

from collections.abc import Iterable

from dflash_wire.records import Row, StepResult
from gateway.coordinator.block_scheduler.records import RowOutcome, StepOutcome
from gateway.coordinator.commit import RowCommit
from gateway.coordinator.planner import PlannedStep
from gateway.coordinator.sequence import Sequence
from gateway.coordinator.widths import traffic_class


class StepClock:
    """Time from one landing to the next, where steps followed each other without a pause.

    Owner: the coordinator; the driver thread alone calls it.
    """

    def __init__(self) -> None:
        self._landed_s: float | None = None
        self._num_cohorts = 0

    def landed(self, now_s: float, num_cohorts: int) -> float | None:
        """Return milliseconds since the landing before, None after a pause or new cohorts. Mutates."""
        before, self._landed_s = self._landed_s, now_s
        is_same = num_cohorts == self._num_cohorts
        self._num_cohorts = num_cohorts
        return 1e3 * (now_s - before) if before is not None and is_same else None

    def pause(self) -> None:
        """Nothing is in flight, or what was has been given up. Mutates."""
        self._landed_s = None


def num_fair_trials(row: Row, token_ids: list[int], commit: RowCommit) -> int:
    """Draft tokens of a row that were accepted, or rejected, by the target alone.

    Args:
        row: a verify row.
        token_ids: what the verifier committed, not clipped: accepted drafts and the bonus.
        commit: what was left of it.
    """
    if len(commit.token_ids) < len(token_ids):
        return commit.num_accepted_drafts  # cut by a stop token or the length limit
    return min(row.width - 1, len(token_ids))


def row_outcome(
    sequence: Sequence, row: Row, token_ids: list[int], commit: RowCommit
) -> RowOutcome:
    """What one verify row says about drafts."""
    return RowOutcome(
        sequence.seq_id,
        traffic_class(sequence),
        row.drafted_width,
        num_fair_trials(row, token_ids, commit),
        commit.num_accepted_drafts,
        len(token_ids),
    )


def step_outcome(
    planned: PlannedStep, rows: Iterable[RowOutcome], result: StepResult, step_ms: float | None
) -> StepOutcome:
    """Put a step's outcome together."""
    plan = planned.plan
    verify_rows = [row for row in plan.rows if not row.is_prefill]
    num_prefill = sum(row.num_positions for row in plan.rows if row.is_prefill)
    widths = {row.drafted_width for row in verify_rows}
    return StepOutcome(
        decision=planned.decision,
        rows=list(rows),
        num_rows=len(verify_rows),
        num_positions=plan.num_positions,
        num_prefill_positions=num_prefill,
        context=sum(row.start_position + 1 for row in verify_rows),
        num_cohorts=plan.num_cohorts,
        draft_width=max(widths, default=1),
        draft_ms=result.draft_ms,
        verify_ms=result.verify_ms,
        # Blocks of several widths cost something between: no cell of the cost model is theirs.
        step_ms=step_ms if len(widths) == 1 else None,
    )
