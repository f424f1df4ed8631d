"""Which decoding sequences get a row in a step, and how wide: by their policies and the block scheduler."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Sequences
from typing import NamedTuple

from dflash_wire.trees import NodeBudget
from gateway.coordinator.block_scheduler.records import Decision, RowState, StepLoad
from gateway.coordinator.learning import Learning
from gateway.coordinator.policy import ADAPTIVE, TABLE, BlockPolicy, cycle_width, parse_policy
from gateway.coordinator.sequence import Sequence

logger = logging.getLogger(__name__)


class RowWidth(NamedTuple):
    """One sequence's share of a step."""

    sequence: Sequence
    width: int
    """Verified positions, anchor included; of a tree, at most so many."""
    draft_width: int
    """Block that the drafter fills; of a chain, at least ``width``."""
    is_tree: bool = False
    shares_nodes: bool = False
    """Its nodes come out of the step's budget."""


class StepWidths(NamedTuple):
    """The rows of a step."""

    rows: list[RowWidth]
    decision: Decision | None
    """The block scheduler's, if it had anything to decide."""
    failures: list[tuple[Sequence, Exception]]
    """Sequences whose policy failed."""


def map_of(row: RowWidth, decision: Decision | None) -> int:
    """Which of the maps that ``node_budget`` gives the drafter is a row's; -1: it does not share nodes."""
    if decision is None or decision.tree is None or not row.shares_nodes:
        return -1
    return list(decision.tree.acceptance).index(row.sequence.traffic_class)


def node_budget(sharing: list[int], decision: Decision | None) -> NodeBudget | None:
    """Return what the drafter shares out among rows with these maps; None if none of them shares."""
    if decision is None or decision.tree is None or max(sharing, default=-1) < 0:
        return None
    tree = decision.tree
    return NodeBudget(sharing, tree.num_nodes, tree.step_ms, list(tree.acceptance.values()))


class WidthChooser:
    """Fits rows into a step's positions.

    Owner: the planner.

    Args:
        max_widths: draft block of each drafter.
        max_tree_positions: largest tree of a policy.
        learning: of the block scheduler, which decides for sequences whose policy fixes no width.
    """

    def __init__(
        self, max_widths: Sequences[int], max_tree_positions: int, learning: Learning
    ) -> None:
        self._default: BlockPolicy | None = None
        self._max_widths = list(max_widths)
        self._max_tree_positions = max_tree_positions
        self._learning = learning

    def set_default(self, text: str) -> None:
        """Give sequences that named no policy another one. Mutates; any thread may call it.

        Those that may draft keep their context in the drafter whatever width they get, so the way back is
        open; those that began under ``off`` have none and go on plainly.

        Raises:
            InvalidRequestError: no such policy, or a drafter cannot follow it.
        """
        most_nodes = self._max_tree_positions
        policies = [parse_policy(text, most, most_nodes) for most in self._max_widths]
        self._default = policies[0]

    def policy_of(self, sequence: Sequence) -> BlockPolicy:
        """The policy that a sequence follows now."""
        policy = sequence.policy
        is_open = sequence.request.policy is None and policy.may_draft
        return self._default or policy if is_open else policy

    def forget(self, seq_id: int) -> None:
        """A sequence has ended: the block scheduler will forget it. Mutates."""
        self._learning.add(seq_id)

    def choose(
        self,
        candidates: Sequences[Sequence],
        num_verify_rows: int,
        budget: int,
        num_prefill_positions: int,
        num_cohorts: int,
    ) -> StepWidths:
        """Take candidates in order until the budget is used. Asks the scheduler; mutates nothing else.

        Args:
            candidates: decoding sequences.
            num_verify_rows: rows that the step is expected to have, for policies.
            budget: positions at most.
            num_prefill_positions: expected beside them.
            num_cohorts: steps in flight.
        """
        taken: list[tuple[Sequence, RowWidth | None]] = []
        failures: list[tuple[Sequence, Exception]] = []
        for sequence in candidates:
            try:
                fixed = self._fixed_width(sequence, num_verify_rows)
            except Exception as error:
                failures.append((sequence, error))
                continue
            width = fixed.width if fixed else 1
            if width > budget:
                break
            budget -= width
            taken.append((sequence, fixed))
        rows, decision = self._with_scheduled(taken, budget, num_prefill_positions, num_cohorts)
        return StepWidths(rows, decision, failures)

    def _fixed_width(self, sequence: Sequence, num_verify_rows: int) -> RowWidth | None:
        most, policy = self._max_widths[sequence.drafter], self.policy_of(sequence)
        if policy is TABLE:
            wanted: int | None = min(most, self._learning.scheduler.table.width(num_verify_rows))
        else:
            wanted = policy.width(sequence.stats, num_verify_rows)
        if wanted is None:
            return None
        if not 1 <= wanted <= (self._max_tree_positions if policy.is_tree else most):
            raise ValueError(f"policy {policy.name} asked for width {wanted}")
        drafted = cycle_width(min(wanted, most), sequence.num_remaining)
        # From a tree nothing is sampled by rejection.
        samples_drafts = sequence.request.sampling.samples_drafts
        if policy.is_tree and drafted > 1 and not samples_drafts:  # what remains limits its depth
            return RowWidth(sequence, wanted, drafted, is_tree=True)
        return RowWidth(sequence, drafted, drafted)

    def _with_scheduled(
        self,
        taken: list[tuple[Sequence, RowWidth | None]],
        left: int,
        num_prefill_positions: int,
        num_cohorts: int,
    ) -> tuple[list[RowWidth], Decision | None]:
        open_rows = [sequence for sequence, row in taken if row is None]
        fixed = [row for _, row in taken if row is not None]
        if not open_rows:
            return fixed, None
        load = StepLoad(
            num_fixed_rows=len(fixed),
            num_fixed_positions=sum(row.width for row in fixed),
            fixed_context=sum(row.sequence.num_committed for row in fixed),
            fixed_draft_width=max((row.draft_width for row in fixed), default=1),
            num_prefill_positions=num_prefill_positions,
            num_cohorts=num_cohorts,
            max_positions=len(open_rows) + left,
            allows_trees=self._may_be_trees(open_rows, len(open_rows) + left),
        )
        decision = self._decide(open_rows, load)
        widths = iter(decision.widths if decision else [1] * len(open_rows))
        rows = []
        for sequence, row in taken:
            if row is None:
                row = self._scheduled(sequence, next(widths), decision)
            rows.append(row)
        return rows, decision

    def _decide(self, rows: list[Sequence], load: StepLoad) -> Decision | None:
        try:
            return self._learning.settled().decide(
                [self._row_state(sequence) for sequence in rows], load
            )
        except Exception:
            # Widths are about speed alone: an error in choosing them may cost nobody his answer.
            logger.exception("the block scheduler failed; %d rows decode plainly", len(rows))
            return None

    def _may_be_trees(self, rows: list[Sequence], most_features: int) -> bool:
        """Whether one drafter can share nodes out among all rows, and all want that."""
        drafter = rows[0].drafter
        # Any row may turn out to keep a whole block, so each needs room for that in the FeaturePool.
        has_room = len(rows) * self._max_widths[drafter] <= most_features
        return has_room and all(
            row.drafter == drafter
            and self.policy_of(row) is ADAPTIVE
            and not row.request.sampling.samples_drafts
            for row in rows
        )

    def _row_state(self, sequence: Sequence) -> RowState:
        most = cycle_width(self._max_widths[sequence.drafter], sequence.num_remaining)
        return RowState(sequence.seq_id, sequence.traffic_class, most, sequence.num_committed)

    def _scheduled(self, sequence: Sequence, width: int, decision: Decision | None) -> RowWidth:
        """A row as the block scheduler decided; it offers blocks of the widest drafter to all."""
        most = self._max_widths[sequence.drafter]
        drafted = min(most, decision.draft_width) if decision else 1
        drafted = cycle_width(drafted, sequence.num_remaining)
        tree = decision.tree if decision else None
        if tree is None:
            return RowWidth(sequence, width, max(width, drafted))
        if drafted == 1:
            return RowWidth(sequence, 1, 1)
        return RowWidth(sequence, tree.most_width, drafted, is_tree=True, shares_nodes=True)
