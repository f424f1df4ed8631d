"""Committing: what a step's result means for the sequences that had a row in it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import NamedTuple

from dflash_wire.errors import FatalError
from dflash_wire.processors import TokenLogprobs
from dflash_wire.records import CycleStats, FinishReason, Row, StepPlan, StepResult
from dflash_wire.trees import TreeOutcome
from gateway.coordinator.sequence import PendingIngest, Sequence


class RowCommit(NamedTuple):
    """What one row added to its sequence."""

    token_ids: list[int]
    finish_reason: FinishReason | None
    num_draft_tokens: int
    """Verified drafts of a verify row; 0 for a prefill row."""
    num_accepted_drafts: int
    """Those of them that were accepted and committed."""
    num_shareable: int
    """Positions that every pool holds now: what this step read and what it wrote, as far as no drafter has to
    ingest it first."""
    logprobs: list[TokenLogprobs] | None = None
    """Of ``token_ids``, if the request asked."""


class RowResult(NamedTuple):
    """What a step's result says of one row."""

    row: Row
    token_ids: list[int]
    """The verifier's tokens for it, not clipped."""
    feature_offset: int
    """FeaturePool row of the row's first position."""
    tree: TreeOutcome | None
    """Of a tree row."""
    logprobs: list[TokenLogprobs] | None = None
    """Of ``token_ids``."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of tokens known before, in a prefill row."""
    num_drafted: int | None = None
    """Drafts of a chain that were verified; None: as many as its width asked for."""


def row_results(plan: StepPlan, result: StepResult) -> Iterator[RowResult]:
    """Yield what a result, which has as many rows as the plan, says of each."""
    trees = repeat(None) if result.trees is None else result.trees
    found = (plan.rows, result.committed_token_ids, plan.feature_offsets(), trees)
    told = (result.logprobs, result.prompt_logprobs, result.num_drafted)
    if told == (None, None, None):
        return map(RowResult, *found)
    return map(RowResult, *found, *(one or repeat(None) for one in told))


def num_verified_positions(plan: StepPlan, result: StepResult) -> int:
    """Packed target positions of a landed step: trees had as many nodes as they were given."""
    if result.trees is None:
        return plan.num_positions
    pairs = zip(plan.rows, result.trees, strict=True)
    return sum(row.num_positions if tree is None else 1 + tree.num_nodes for row, tree in pairs)


def check_result(plan: StepPlan, result: StepResult) -> None:
    """Check that a result can belong to the plan.

    Raises:
        FatalError: it can not; nothing of it may be committed.
    """
    if result.step_id != plan.step_id:
        raise FatalError(f"The engine answered step {result.step_id}, not step {plan.step_id}.")
    num_results = len(result.committed_token_ids)
    if num_results != len(plan.rows):
        raise FatalError(f"The engine answered {num_results} rows of {len(plan.rows)}.")
    if result.trees is not None and len(result.trees) != num_results:
        raise FatalError(f"The engine answered {len(result.trees)} trees for {num_results} rows.")
    if result.num_drafted is not None and len(result.num_drafted) != num_results:
        raise FatalError(f"The engine counted drafts of {len(result.num_drafted)} rows.")
    tells = result.logprobs is not None or result.prompt_logprobs is not None
    if tells or any(row.extras is not None for row in plan.rows):
        check_logprobs(plan, result)
    trees = repeat(None) if result.trees is None else result.trees
    for row, token_ids, tree in zip(plan.rows, result.committed_token_ids, trees, strict=False):
        if row.is_tree != (tree is not None):
            raise FatalError("The engine verified other trees than were planned.")
        if tree is not None and not len(token_ids) - 1 <= tree.num_nodes < row.width:
            raise FatalError(f"The engine verified {tree.num_nodes} nodes in a row of {row.width}.")
        most = int(row.samples) if row.is_prefill else row.most_kept
        least = most if row.is_prefill else 1
        if not least <= len(token_ids) <= most:
            raise FatalError(
                f"The engine committed {len(token_ids)} tokens in a row of {least} to {most}."
            )


def check_logprobs(plan: StepPlan, result: StepResult) -> None:
    """Check that rows which ask for log-probabilities have them, one per token, and no others.

    Raises:
        FatalError: that is not so.
    """
    wanted = [
        len(token_ids) if row.extras and row.extras.num_logprobs is not None and token_ids else None
        for row, token_ids in zip(plan.rows, result.committed_token_ids, strict=True)
    ]
    given = result.logprobs or [None] * len(wanted)
    known = [_num_known(row) for row in plan.rows]
    told = result.prompt_logprobs or [None] * len(wanted)
    for asked, answered in ((wanted, given), (known, told)):
        if asked != [None if one is None else len(one) for one in answered]:
            raise FatalError("The engine answered other log-probabilities than were asked for.")


def _num_known(row: Row) -> int | None:
    """Tokens whose log-probabilities a prefill row has to tell; None if it is not asked."""
    extras = row.extras
    if extras is None or extras.num_prompt_logprobs is None:
        return None
    return len(row.token_ids) - (extras.next_token_id is None)


def clip(sequence: Sequence, token_ids: list[int]) -> tuple[list[int], FinishReason | None]:
    """Cut a row's tokens at the first stop token (kept) or at the length limit. Does not mutate."""
    num_remaining = sequence.num_remaining
    token_ids = token_ids[:num_remaining]
    if not sequence.stop_token_ids.isdisjoint(token_ids):
        for index, token_id in enumerate(token_ids):
            if token_id in sequence.stop_token_ids:
                return token_ids[: index + 1], FinishReason.STOP
    is_full = len(token_ids) == num_remaining
    return token_ids, FinishReason.LENGTH if is_full else None


def commit_row(sequence: Sequence, result: RowResult) -> RowCommit:
    """Commit one row's tokens. Mutates tokens and cache state.

    Args:
        sequence: the row's owner.
        result: checked by ``check_result``.
    """
    row, token_ids, feature_offset, tree, logprobs, prompt_logprobs, num_drafted = result
    committed, finish_reason = clip(sequence, token_ids) if token_ids else (token_ids, None)
    # A verify row's inputs are the anchor and the accepted drafts: as many as it commits unclipped.
    num_cached = row.num_positions if row.is_prefill else len(token_ids)
    sequence.num_cached = row.start_position + num_cached
    sequence.is_decoding = sequence.is_decoding or row.samples
    sequence.token_ids.extend(committed)
    num_shareable = sequence.num_cached
    if sequence.policy.may_draft:
        pending = sequence.pending_ingests
        num_shareable = pending[0].start_position if pending else row.start_position
        if finish_reason is None:
            sequence.add_pending(PendingIngest(feature_offset, num_cached, row.start_position))
    num_draft_tokens = num_accepted_drafts = 0
    if not row.is_prefill:
        num_draft_tokens = row.width - 1 if tree is None else tree.num_nodes
        if num_drafted is not None:
            num_draft_tokens = num_drafted
        num_accepted_drafts = min(len(token_ids) - 1, len(committed))
    # A row that ended early wrote positions behind its last token.
    num_shareable = min(num_shareable, sequence.num_committed)
    if prompt_logprobs is not None:
        sequence.prompt_logprobs[row.start_position :] = prompt_logprobs
    if logprobs is not None:
        logprobs = logprobs[: len(committed)]
    num_drafts = (num_draft_tokens, num_accepted_drafts)
    return RowCommit(committed, finish_reason, *num_drafts, num_shareable, logprobs)


def cycle_stats(commit: RowCommit, result: StepResult, wall_ms: float) -> CycleStats:
    """What a verify row's cycle was and cost, of which ``wall_ms`` passed since it began."""
    return CycleStats(
        num_draft_tokens=commit.num_draft_tokens,
        num_accepted_drafts=commit.num_accepted_drafts,
        num_committed=len(commit.token_ids),
        draft_ms=result.draft_ms,
        verify_ms=result.verify_ms,
        overhead_ms=max(0.0, wall_ms - result.draft_ms - result.verify_ms),
    )
