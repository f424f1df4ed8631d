"""Held-out evaluation of a drafter, teacher-forced."""

from __future__ import annotations

import torch

from drafter.model import DraftModel
from drafter.training.capture import FeatureSource, TargetTables
from drafter.training.config import TrainingConfig
from drafter.training.data import BatchPlan, TrainingRow, collate
from drafter.training.objective import (
    BlockScores,
    Metrics,
    draft_hidden,
    draw_anchors,
    lay_out,
    position_weights,
    score_blocks,
)


@torch.no_grad()
def evaluate_drafter(
    model: DraftModel,
    source: FeatureSource,
    tables: TargetTables,
    rows: list[TrainingRow],
    config: TrainingConfig,
) -> Metrics:
    """Score ``rows`` in the model's own precision, at most ``held_out_blocks`` blocks of each.

    The anchors depend on the seed alone, so figures of one run can be compared with each other.

    Args:
        model: draft model with the training attention; its mode is left as it was.
        source: target features.
        tables: the target's embedding and head.
        rows: held-out rows, at least one.
        config: sizes and seed.
    """
    weights = position_weights(config.draft_block_size, config.decay_length)
    plan = BatchPlan([len(row.input_ids) for row in rows], config.tokens_per_step, config.seed)
    device = next(model.parameters()).device
    total: BlockScores | None = None
    for group in plan.epoch(0):
        batch = collate(rows, group)
        anchors = []
        for row_id, mask in zip(group, batch.loss_mask, strict=True):
            generator = torch.Generator().manual_seed(config.seed + row_id)
            anchors.append(draw_anchors(mask, config.held_out_blocks, generator))
        blocks = lay_out(batch, anchors, config.draft_block_size).to(device)
        features = source.features(batch.input_ids.to(device), batch.lengths)
        hidden = draft_hidden(model, tables, features, blocks)
        scores = score_blocks(
            hidden, tables.lm_head, blocks, weights.to(device), config.logits_chunk
        )
        total = scores if total is None else total + scores
    assert total is not None
    return total.metrics()
