"""Which decoding sequences get a row in a step, and how wide: by their policies and the block scheduler."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Sequences
from typing import NamedTuple

from gateway.coordinator.block_scheduler.records import Decision, RowState, StepLoad
from gateway.coordinator.learning import Learning
from gateway.coordinator.policy import TABLE, BlockPolicy, cycle_width, parse_policy
from gateway.coordinator.sequence import Sequence

logger = logging.getLogger(__name__)

WARM = 0.75
"""Temperatures above this are a class of their own: their drafts fare worse."""


class RowWidth(NamedTuple):
    """One sequence's share of a step."""

    sequence: Sequence
    width: int
    """Verified positions, anchor included."""
    draft_width: int
    """Block that the drafter fills; at least ``width``."""


class StepWidths(NamedTuple):
    """The rows of a step."""

    rows: list[RowWidth]
    decision: Decision | None
    """The block scheduler's, if it had anything to decide."""
    failures: list[tuple[Sequence, Exception]]
    """Sequences whose policy failed."""


def traffic_class(sequence: Sequence) -> str:
    """Sequences of one class are expected to be drafted alike: by drafter and temperature."""
    temperature = sequence.request.sampling.temperature
    heat = "greedy" if temperature == 0 else "warm" if temperature <= WARM else "hot"
    return f"{sequence.drafter}:{heat}"


class WidthChooser:
    """Fits rows into a step's positions.

    Owner: the planner.

    Args:
        max_widths: draft block of each drafter.
        learning: of the block scheduler, which decides for sequences whose policy fixes no width.
    """

    def __init__(self, max_widths: Sequences[int], learning: Learning) -> None:
        self._default: BlockPolicy | None = None
        self._max_widths = list(max_widths)
        self._learning = learning

    def set_default(self, text: str) -> None:
        """Give sequences that named no policy another one. Mutates; any thread may call it.

        Those that may draft keep their context in the drafter whatever width they get, so the way back is
        open; those that began under ``off`` have none and go on plainly.

        Raises:
            InvalidRequestError: no such policy, or a drafter cannot follow it.
        """
        policies = [parse_policy(text, most) for most in self._max_widths]
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
        taken: list[tuple[Sequence, int | None]] = []
        failures: list[tuple[Sequence, Exception]] = []
        for sequence in candidates:
            try:
                width = self._fixed_width(sequence, num_verify_rows)
            except Exception as error:
                failures.append((sequence, error))
                continue
            if (width or 1) > budget:
                break
            budget -= width or 1
            taken.append((sequence, width))
        rows, decision = self._with_scheduled(taken, budget, num_prefill_positions, num_cohorts)
        return StepWidths(rows, decision, failures)

    def _fixed_width(self, sequence: Sequence, num_verify_rows: int) -> int | None:
        most, policy = self._max_widths[sequence.drafter], self.policy_of(sequence)
        if policy is TABLE:
            wanted: int | None = min(most, self._learning.scheduler.table.width(num_verify_rows))
        else:
            wanted = policy.width(sequence.stats, num_verify_rows)
        if wanted is None:
            return None
        if not 1 <= wanted <= most:
            raise ValueError(f"policy {policy.name} asked for width {wanted}")
        return cycle_width(wanted, sequence.num_remaining)

    def _with_scheduled(
        self,
        taken: list[tuple[Sequence, int | None]],
        left: int,
        num_prefill_positions: int,
        num_cohorts: int,
    ) -> tuple[list[RowWidth], Decision | None]:
        open_rows = [sequence for sequence, width in taken if width is None]
        if not open_rows:
            return [RowWidth(s, w, w) for s, w in taken if w is not None], None
        fixed = [(sequence, width) for sequence, width in taken if width is not None]
        load = StepLoad(
            num_fixed_rows=len(fixed),
            num_fixed_positions=sum(width for _, width in fixed),
            fixed_context=sum(sequence.num_committed for sequence, _ in fixed),
            fixed_draft_width=max((width for _, width in fixed), default=1),
            num_prefill_positions=num_prefill_positions,
            num_cohorts=num_cohorts,
            max_positions=len(open_rows) + left,
        )
        decision = self._decide(open_rows, load)
        widths = iter(decision.widths if decision else [1] * len(open_rows))
        rows = []
        for sequence, width in taken:
            if width is None:
                width = next(widths)
                drafted = decision.draft_width if decision else 1
                drafted = max(width, cycle_width(drafted, sequence.num_remaining))
                rows.append(RowWidth(sequence, width, drafted))
            else:
                rows.append(RowWidth(sequence, width, width))
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

    def _row_state(self, sequence: Sequence) -> RowState:
        most = cycle_width(self._max_widths[sequence.drafter], sequence.num_remaining)
        return RowState(sequence.seq_id, traffic_class(sequence), most, sequence.num_committed)
