"""What the block scheduler is told of a landed step."""

from __future__ import annotations

from collections.abc import Iterable

from dflash_wire.records import FinishReason, Row, StepResult
from gateway.coordinator.block_scheduler.records import RowOutcome, StepOutcome, TreeRowOutcome
from gateway.coordinator.commit import RowCommit, RowResult, num_verified_positions
from gateway.coordinator.planner import PlannedStep
from gateway.coordinator.sequence import Sequence

EVEN = 0.9
"""A step's time counts if the drafter fills so much of what it would if all blocks were as wide."""


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

    A token that the drafter left out of a chain counts as a rejected one: it brings as little.
    """
    if len(commit.token_ids) < len(token_ids):
        return commit.num_accepted_drafts  # cut by a stop token or the length limit
    return min(row.width - 1, len(token_ids))


def row_outcome(sequence: Sequence, result: RowResult, commit: RowCommit) -> RowOutcome:
    """What one verify row says about drafts.

    Args:
        result: of a chain. What a tree commits says nothing of chains: a second sibling may have been right.
    """
    return RowOutcome(
        sequence.seq_id,
        sequence.traffic_class,
        result.row.drafted_width,
        num_fair_trials(result.row, result.token_ids, commit),
        commit.num_accepted_drafts,
        len(result.token_ids),
        result.row.width,
    )


def tree_outcome(sequence: Sequence, result: RowResult, commit: RowCommit) -> TreeRowOutcome:
    """What one tree row says about trees."""
    tree, num_tokens = result.tree, len(result.token_ids)
    assert tree is not None
    is_cut = commit.finish_reason is FinishReason.STOP and len(commit.token_ids) < num_tokens
    return TreeRowOutcome(
        sequence.seq_id,
        sequence.traffic_class,
        result.row.drafted_width,
        tree.num_nodes,
        tree.accepted_nodes,
        tree.scores,
        num_tokens,
        is_cut,
        tree.chain_trials,
        tree.chain_hits,
    )


def step_outcome(
    planned: PlannedStep,
    commits: Iterable[tuple[Sequence, RowResult, RowCommit]],
    result: StepResult,
    step_ms: float | None,
) -> StepOutcome:
    """Put a step's outcome together. Reads only what stays as it is: it may be done long after the commits.

    Args:
        planned: the step.
        commits: of its rows that were committed.
        result: what the ring answered.
        step_ms: time since the landing before, if that says anything.
    """
    plan = planned.plan
    rows, trees = list[RowOutcome](), list[TreeRowOutcome]()
    for sequence, row_result, commit in commits:
        if row_result.tree is not None:
            trees.append(tree_outcome(sequence, row_result, commit))
        elif not row_result.row.is_prefill:
            rows.append(row_outcome(sequence, row_result, commit))
    verify_rows = [row for row in plan.rows if not row.is_prefill]
    num_prefill = sum(row.num_positions for row in plan.rows if row.is_prefill)
    return StepOutcome(
        decision=planned.decision,
        rows=rows,
        num_rows=len(verify_rows),
        num_positions=num_verified_positions(plan, result),
        num_prefill_positions=num_prefill,
        context=sum(row.start_position + 1 for row in verify_rows),
        num_cohorts=plan.num_cohorts,
        draft_width=_priced_width(planned, verify_rows),
        draft_ms=result.draft_ms,
        verify_ms=result.verify_ms,
        step_ms=step_ms if _has_price(planned, verify_rows) else None,
        trees=trees,
    )


def _priced_width(planned: PlannedStep, rows: list[Row]) -> int:
    """The draft width that a step is a case of; trees that share nodes have one to themselves."""
    tree = planned.decision.tree if planned.decision else None
    if planned.plan.node_budget is not None and tree is not None:
        return tree.draft_width
    return max((row.drafted_width for row in rows), default=1)


def _has_price(planned: PlannedStep, rows: list[Row]) -> bool:
    """Whether a step's time says anything: blocks of several widths cost something between.

    Rows near their end have narrower blocks, which a few of many may.
    """
    if not rows:
        return False
    drafted = [row.drafted_width for row in rows]
    has_budget = planned.plan.node_budget is not None
    widest = planned.decision.draft_width if planned.decision and has_budget else max(drafted)
    is_even = sum(drafted) >= EVEN * len(rows) * widest
    return is_even and (has_budget or not any(row.is_tree for row in rows))
