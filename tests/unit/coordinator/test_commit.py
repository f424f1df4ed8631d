"""Committing one row: clipping, cache state, accepted drafts."""

from __future__ import annotations

import pytest
from coordinator_fakes import make_request

from dflash_wire.errors import FatalError
from dflash_wire.records import CycleStats, FinishReason, Row, StepPlan, StepResult
from dflash_wire.trees import TreeOutcome
from gateway.coordinator import parse_policy
from gateway.coordinator.commit import RowResult, check_result, clip, commit_row, row_results
from gateway.coordinator.feedback import num_fair_trials
from gateway.coordinator.sequence import PendingIngest, Sequence


def decoding_sequence(num_committed: int, num_remaining: int, stop: list[int]) -> Sequence:
    request = make_request("r", num_committed, 100, stop=stop)
    sequence = Sequence(request, num_committed + num_remaining, parse_policy("static:8", 16), 4)
    sequence.num_cached = num_committed - 1
    sequence.is_decoding = True
    return sequence


@pytest.mark.parametrize(
    ("num_remaining", "stop", "kept", "reason"),
    [
        (9, [], 4, None),
        (4, [], 4, FinishReason.LENGTH),
        (2, [], 2, FinishReason.LENGTH),
        (9, [503], 4, FinishReason.STOP),
        (9, [500], 1, FinishReason.STOP),
        (9, [502, 501], 2, FinishReason.STOP),
        (2, [501], 2, FinishReason.STOP),
        (2, [502], 2, FinishReason.LENGTH),
        (1, [500], 1, FinishReason.STOP),
    ],
)
def test_clip(num_remaining: int, stop: list[int], kept: int, reason: FinishReason | None) -> None:
    sequence = decoding_sequence(6, num_remaining, stop)
    token_ids = [500, 501, 502, 503]
    assert clip(sequence, token_ids) == (token_ids[:kept], reason)
    assert sequence.num_committed == 6


def test_verify_row_moves_the_anchor_and_leaves_an_ingest() -> None:
    sequence = decoding_sequence(6, 50, [])
    row = Row(0, sequence.token_ids[-1:], 5, [0, 1, 2, 3], width=8)
    commit = commit_row(sequence, RowResult(row, [500, 501, 502], 40, None))
    assert (commit.token_ids, commit.finish_reason) == ([500, 501, 502], None)
    assert sequence.num_cached == sequence.anchor_position == 8
    assert sequence.pending_ingests == [PendingIngest(40, 3, 5)]
    assert commit.num_accepted_drafts == 2


@pytest.mark.parametrize(("stop", "num_kept"), [(500, 1), (503, 4), (506, 7), (507, 8)])
def test_only_committed_drafts_count_as_accepted(stop: int, num_kept: int) -> None:
    # Seven accepted drafts and a bonus; the stop token cuts some drafts, or just the bonus, off.
    sequence = decoding_sequence(6, 50, [stop])
    row = Row(0, sequence.token_ids[-1:], 5, [0, 1, 2, 3], width=8)
    commit = commit_row(sequence, RowResult(row, list(range(500, 508)), 0, None))
    assert (len(commit.token_ids), commit.num_accepted_drafts) == (num_kept, min(7, num_kept))
    # A gateway that cuts the whole cycle at the same token counts the same.
    clipped = CycleStats(7, 7, 8, 0.0, 0.0, 0.0).clipped(num_kept)
    assert clipped == CycleStats(7, commit.num_accepted_drafts, num_kept, 0.0, 0.0, 0.0)
    assert sequence.pending_ingests == []


def test_a_short_chain_counts_the_drafts_it_had() -> None:
    """And the first that was left out is, for whoever chooses widths, as good as rejected."""
    sequence = decoding_sequence(6, 50, [])
    row = Row(0, sequence.token_ids[-1:], 5, [0, 1, 2, 3], width=8)
    result = StepResult(0, [[500, 501, 502]], num_drafted=[2])
    (found,) = row_results(StepPlan(0, [row]), result)
    commit = commit_row(sequence, found)
    assert (commit.num_draft_tokens, commit.num_accepted_drafts) == (2, 2)
    assert num_fair_trials(row, result.committed_token_ids[0], commit) == 3
    with pytest.raises(FatalError, match="counted drafts of 2 rows"):
        check_result(StepPlan(0, [row]), StepResult(0, [[500]], num_drafted=[1, 2]))


def test_prefill_chunk_commits_nothing_until_it_samples() -> None:
    sequence = Sequence(make_request("r", 6), 20, parse_policy("static:2", 16), 4)
    prompt = list(sequence.token_ids)
    first = Row(0, prompt[:4], 0, [0, 1], is_prefill=True, samples=False)
    commit_row(sequence, RowResult(first, [], 3, None))
    assert (sequence.num_cached, sequence.is_decoding) == (4, False)
    assert sequence.pending_ingests == [PendingIngest(3, 4, 0)]
    second = Row(0, prompt[4:], 4, [0, 1], is_prefill=True)
    commit_row(sequence, RowResult(second, [500], 0, None))
    assert (sequence.num_cached, sequence.is_decoding) == (6, True)
    assert sequence.token_ids == [*prompt, 500]
    assert sequence.pending_ingests == [PendingIngest(3, 4, 0), PendingIngest(0, 2, 4)]


def tree_row(width: int, draft_width: int) -> Row:
    return Row(0, [7], 5, [0, 1, 2, 3], width, draft_width=draft_width, is_tree=True)


def test_a_tree_counts_the_nodes_it_had() -> None:
    sequence = decoding_sequence(6, 50, [])
    tree = TreeOutcome(9, [0, 3], b"")
    commit = commit_row(sequence, RowResult(tree_row(32, 8), [500, 501, 502], 40, tree))
    assert (commit.num_draft_tokens, commit.num_accepted_drafts) == (9, 2)
    assert sequence.pending_ingests == [PendingIngest(40, 3, 5)]


@pytest.mark.parametrize(
    ("tokens", "trees"),
    [
        ([1, 2], None),  # a tree was planned
        ([1, 2], [None]),
        ([1, 2], []),
        ([1, 2], [TreeOutcome(9, [0], b""), None]),
        ([1, 2, 3], [TreeOutcome(1, [0], b"")]),  # more accepted than verified
        ([1, 2], [TreeOutcome(32, [0], b"")]),  # more verified than planned
        ([1] * 9, [TreeOutcome(20, [0], b"")]),  # a path behind the block
        ([], [TreeOutcome(20, [], b"")]),
    ],
)
def test_results_that_cannot_be_a_planned_trees(
    tokens: list[int], trees: list[TreeOutcome | None] | None
) -> None:
    plan = StepPlan(3, [tree_row(32, 8)])
    check_result(plan, StepResult(3, [[1] * 8], trees=[TreeOutcome(31, list(range(7)), b"")]))
    with pytest.raises(FatalError):
        check_result(plan, StepResult(3, [tokens], trees=trees))


def test_features_lie_where_they_were_planned() -> None:
    rows = [
        tree_row(32, 8),
        Row(1, [1, 2, 3], 0, [4], is_prefill=True),
        Row(2, [1], 9, [5]),
        tree_row(4, 8),
        Row(3, [1], 9, [6], 4, draft_width=16),
        tree_row(3, 3),
    ]
    plan = StepPlan(1, rows, feature_base=100)
    assert list(plan.feature_offsets()) == [100, 108, 111, 112, 116, 120]
    assert (plan.num_features, plan.num_positions) == (23, 32 + 3 + 1 + 4 + 4 + 3)
    result = StepResult(1, [[1], [1], [1], [1], [1], [1]])
    assert [row.feature_offset for row in row_results(plan, result)] == list(plan.feature_offsets())
