"""Anchors, layout, weights, visibility and metrics of the objective."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from training_models import MASK_ID, VOCAB, tiny_drafter, tiny_target

from drafter.training.attention import visible_keys
from drafter.training.capture import TargetTables, TransformersFeatureSource
from drafter.training.data import TrainingRow, collate
from drafter.training.objective import (
    DraftBlocks,
    draft_hidden,
    draw_anchors,
    draw_sizes,
    lay_out,
    leading_runs,
    position_weights,
    score_blocks,
)


def test_anchors_are_sorted_distinct_and_supervised_with_their_first_label() -> None:
    mask = torch.tensor([0, 1, 1, 1, 0, 1, 0, 1, 1], dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    assert draw_anchors(mask, 99, generator).tolist() == [1, 2, 7]
    for _ in range(20):
        drawn = draw_anchors(mask, 2, generator).tolist()
        assert len(set(drawn)) == 2
        assert drawn == sorted(drawn)
        assert set(drawn) <= {1, 2, 7}


def test_a_row_without_candidates_has_no_anchor() -> None:
    mask = torch.tensor([0, 1, 0, 1], dtype=torch.bool)
    assert draw_anchors(mask, 5, torch.Generator()).tolist() == []


def test_anchors_are_redrawn() -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(200, dtype=torch.bool)
    assert draw_anchors(mask, 8, generator).tolist() != draw_anchors(mask, 8, generator).tolist()


def test_weights_decay_from_one() -> None:
    weights = position_weights(16, 7.0)
    assert weights.shape == (15,)
    for k in (1, 2, 8, 15):
        assert float(weights[k - 1]) == pytest.approx(math.exp(-(k - 1) / 7.0))


def test_labels_stand_at_their_own_position_and_stop_with_the_supervision() -> None:
    rows = [
        TrainingRow([10, 11, 12, 13, 14, 15], [False, True, True, True, False, True]),
        TrainingRow([20, 21, 22], [True, True, True]),
    ]
    blocks = lay_out(collate(rows, [0, 1]), [torch.tensor([1]), torch.tensor([0, 1])], 5)
    assert blocks.rows.tolist() == [0, 1, 1]
    assert blocks.anchor_ids.tolist() == [11, 20, 21]
    assert blocks.labels.tolist() == [[12, 13, 14, 15], [21, 22, 0, 0], [22, 0, 0, 0]]
    assert blocks.is_supervised.tolist() == [
        [True, True, False, True],
        [True, True, False, False],
        [True, False, False, False],
    ]


def _hidden(features: torch.Tensor, blocks: DraftBlocks) -> torch.Tensor:
    target = tiny_target()
    with torch.no_grad():
        return draft_hidden(tiny_drafter(target), TargetTables.of(target), features, blocks)


def _example() -> tuple[torch.Tensor, DraftBlocks]:
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(2, 9, 3 * 32, generator=generator)
    none = torch.zeros(3, 3, dtype=torch.long)
    blocks = DraftBlocks(
        rows=torch.tensor([0, 0, 1]),
        anchors=torch.tensor([2, 6, 4]),
        anchor_ids=torch.tensor([7, 8, 9]),
        labels=none,
        is_supervised=none.bool(),
        sizes=torch.full((3,), 4),
    )
    return features, blocks


def test_a_block_sees_exactly_the_context_before_its_anchor() -> None:
    features, blocks = _example()
    before = _hidden(features, blocks)
    for row in range(2):
        for position in range(9):
            changed = features.clone()
            changed[row, position] += 1.0
            after = _hidden(changed, blocks)
            for block in range(3):
                is_visible = int(blocks.rows[block]) == row and position < int(
                    blocks.anchors[block]
                )
                is_equal = torch.equal(before[block], after[block])
                assert is_equal != is_visible, (row, position, block)


def test_a_block_sees_its_own_anchor_and_no_other_block() -> None:
    features, blocks = _example()
    before = _hidden(features, blocks)
    for changed_block in range(3):
        ids = blocks.anchor_ids.clone()
        ids[changed_block] = 40
        other = dataclasses.replace(blocks, anchor_ids=ids)
        after = _hidden(features, other)
        for block in range(3):
            is_equal = bool((before[block] == after[block]).all(-1).any())
            assert is_equal == (block != changed_block)


def test_masked_positions_see_each_other_both_ways() -> None:
    """Changing one block token's embedding changes every row of the block, earlier ones too."""
    target = tiny_target()
    model, tables = tiny_drafter(target), TargetTables.of(target)
    features, blocks = _example()
    captured: list[torch.Tensor] = []
    original = model.forward

    def nudge(embeddings: torch.Tensor, positions: torch.Tensor, **kwargs: object) -> torch.Tensor:
        embeddings = embeddings.clone()
        embeddings[0, 3] += 1.0  # the last masked position of the first block
        out = original(embeddings, positions, **kwargs)
        captured.append(out)
        return out

    with torch.no_grad():
        before = draft_hidden(model, tables, features, blocks)
        model.forward = nudge  # type: ignore[method-assign]
        after = draft_hidden(model, tables, features, blocks)
    assert len(captured) == 1
    assert not (before[0] == after[0]).all(-1).any()
    assert torch.equal(before[1:], after[1:])


def test_a_batch_of_blocks_equals_each_block_alone() -> None:
    features, blocks = _example()
    together = _hidden(features, blocks)
    for index in range(3):
        row, anchor = int(blocks.rows[index]), int(blocks.anchors[index])
        alone = DraftBlocks(
            rows=torch.tensor([0]),
            anchors=torch.tensor([anchor]),
            anchor_ids=blocks.anchor_ids[index : index + 1],
            labels=blocks.labels[:1],
            is_supervised=blocks.is_supervised[:1],
            sizes=blocks.sizes[:1],
        )
        single = _hidden(features[row : row + 1, :anchor], alone)
        torch.testing.assert_close(single[0], together[index], rtol=1e-5, atol=1e-5)


def test_padding_behind_a_row_changes_nothing() -> None:
    target = tiny_target()
    source = TransformersFeatureSource(target, [1, 2, 3])
    row = TrainingRow(list(range(10, 18)), [True] * 8)
    long = TrainingRow(list(range(20, 40)), [True] * 20)
    alone, padded = collate([row], [0]), collate([row, long], [0, 1])
    short = source.features(alone.input_ids, alone.lengths)
    with_padding = source.features(padded.input_ids, padded.lengths)
    torch.testing.assert_close(short[0], with_padding[0, :8], rtol=1e-5, atol=1e-5)


def test_leading_runs_by_hand() -> None:
    cases = [[1, 1, 1], [1, 0, 1], [0, 1, 1], [1, 1, 0]]
    assert leading_runs(torch.tensor(cases, dtype=torch.bool)).tolist() == [3, 1, 0, 2]


def test_eal_accuracy_and_loss_by_hand() -> None:
    """Head = identity, so a hidden state that is one-hot predicts that token."""
    labels = torch.tensor([[4, 5, 6], [7, 8, 9]])
    supervised = torch.tensor([[True, True, True], [True, True, False]])
    predictions = torch.tensor([[4, 5, 60], [7, 8, 9]])
    hidden = 30.0 * torch.nn.functional.one_hot(predictions, VOCAB).float()
    zeros = torch.zeros(2, dtype=torch.long)
    blocks = DraftBlocks(zeros, zeros, zeros, labels, supervised, zeros + 4)
    weights = position_weights(4, 2.0)
    scores = score_blocks(hidden, torch.eye(VOCAB), blocks, weights, chunk=8)
    metrics = scores.metrics()
    assert metrics.eal == 1 + (2 + 2) / 2  # the correct guess behind the end does not count
    assert metrics.accuracy == [1.0, 1.0, 0.0]
    total = float((supervised * weights).sum())
    assert metrics.loss == pytest.approx(30.0 * float(weights[2]) / total, abs=1e-3)
    assert (scores + scores).metrics() == metrics


def test_chunks_change_neither_loss_nor_gradient() -> None:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, VOCAB, (5, 3), generator=generator)
    zeros = torch.zeros(5, dtype=torch.long)
    blocks = DraftBlocks(zeros, zeros, zeros, labels, torch.ones(5, 3, dtype=torch.bool), zeros + 4)
    head = torch.randn(VOCAB, 8, generator=generator)
    start = torch.randn(5, 3, 8, generator=generator)
    results = []
    for chunk in (5, 2):
        hidden = start.clone().requires_grad_()
        loss = score_blocks(hidden, head, blocks, position_weights(4, 2.0), chunk).loss
        loss.backward()
        results.append((loss.detach(), hidden.grad))
    torch.testing.assert_close(results[0], results[1])


def test_mask_token_fills_every_position_but_the_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    model, tables = tiny_drafter(target), TargetTables.of(target)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    original = model.forward

    def spy(embeddings: torch.Tensor, positions: torch.Tensor, **kwargs: object) -> torch.Tensor:
        seen.append((embeddings, positions))
        return original(embeddings, positions, **kwargs)

    monkeypatch.setattr(model, "forward", spy)
    features, blocks = _example()
    draft_hidden(model, tables, features, blocks)
    embeddings, positions = seen[0]
    expected = [7, *[MASK_ID] * 3, 8, *[MASK_ID] * 3, 9, *[MASK_ID] * 3]
    assert torch.equal(embeddings[0], tables.embedding[expected])
    assert positions[0].tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 4, 5, 6, 7]


def test_narrow_blocks_hide_what_is_behind_them() -> None:
    rows = [TrainingRow(tuple(range(10, 22)), (True,) * 12)]
    batch = collate(rows, [0])
    blocks = lay_out(batch, [torch.tensor([2, 3])], 6, [torch.tensor([3, 6])])
    assert blocks.sizes.tolist() == [3, 6]
    assert blocks.is_supervised.tolist() == [[True, True, False, False, False], [True] * 5]
    seen = visible_keys(blocks.anchors, 3, 6, blocks.sizes)[:, 0, 0].tolist()
    assert seen[0] == [True, True, False, True, True, True, False, False, False]
    assert seen[1] == [True, True, True] + [True] * 6


def test_sizes_are_whole_without_a_share_and_in_range_with_one() -> None:
    assert draw_sizes(5, 16, 0.0, torch.Generator()).tolist() == [16] * 5
    drawn = draw_sizes(4000, 16, 0.5, torch.Generator().manual_seed(1))
    assert set(drawn.tolist()) == set(range(2, 17))
    assert 0.45 < float((drawn < 16).float().mean()) < 0.55
