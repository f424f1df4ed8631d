"""The DFlash objective: random anchors, masked draft blocks, position-weighted cross-entropy.

A draft block is ``[anchor, MASK x (B-1)]``. Row k of it predicts the data token at its own position
(no shift), weighted ``exp(-(k-1)/gamma)``; the anchor's row predicts nothing.

Shape letters: R sequences, T tokens, M draft blocks, B draft block size, N = B-1 draft tokens,
K*H target features, H hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from drafter.model import DraftModel
from drafter.training.attention import make_block_context
from drafter.training.capture import TargetTables
from drafter.training.data import Batch


@dataclass(frozen=True)
class DraftBlocks:
    """The draft blocks of one pass, sorted by sequence and anchor.

    Attributes:
        rows: ``[M]`` int64, sequence of each block.
        anchors: ``[M]`` int64, position of each anchor.
        anchor_ids: ``[M]`` int64, token at the anchor.
        labels: ``[M, N]`` int64, data tokens at the masked positions (0 where there is none).
        is_supervised: ``[M, N]`` bool, inside the sequence, its loss mask and the block's size.
        sizes: ``[M]`` int64, 2..B; positions behind a block's size are hidden from it.
    """

    rows: Tensor
    anchors: Tensor
    anchor_ids: Tensor
    labels: Tensor
    is_supervised: Tensor
    sizes: Tensor

    def to(self, device: torch.device) -> DraftBlocks:
        """Move to a device."""
        return DraftBlocks(
            self.rows.to(device),
            self.anchors.to(device),
            self.anchor_ids.to(device),
            self.labels.to(device),
            self.is_supervised.to(device),
            self.sizes.to(device),
        )


@dataclass(frozen=True)
class BlockScores:
    """Sums over draft blocks, so that passes can be added up.

    Attributes:
        loss: weighted cross-entropy, not yet divided.
        weight: sum of the weights.
        num_correct: ``[N]`` right predictions per position.
        num_supervised: ``[N]`` labels per position.
        run_total: sum over blocks of the leading correct run.
        num_blocks: number of blocks.
    """

    loss: Tensor
    weight: Tensor
    num_correct: Tensor
    num_supervised: Tensor
    run_total: Tensor
    num_blocks: int

    def __add__(self, other: BlockScores) -> BlockScores:
        """Add two passes up."""
        return BlockScores(
            self.loss + other.loss,
            self.weight + other.weight,
            self.num_correct + other.num_correct,
            self.num_supervised + other.num_supervised,
            self.run_total + other.run_total,
            self.num_blocks + other.num_blocks,
        )

    def detached(self) -> BlockScores:
        """Forget the graph."""
        return dataclasses.replace(self, loss=self.loss.detach())

    def metrics(self) -> Metrics:
        """Divide the sums."""
        accuracy = self.num_correct / self.num_supervised.clamp(min=1)
        return Metrics(
            float(self.loss / self.weight),
            [round(float(a), 4) for a in accuracy],
            1.0 + float(self.run_total) / self.num_blocks,
        )


@dataclass(frozen=True)
class Metrics:
    """What a run logs.

    Attributes:
        loss: weighted mean cross-entropy in nats.
        accuracy: per draft position, first one first.
        eal: teacher-forced expected acceptance length: 1 (the bonus token) plus the mean, over
            draft blocks, of the number of leading draft positions that are all correct. The data
            stands for the target's choices, so on the target's own greedy responses it is the mean
            acceptance length at temperature 0 over *all* anchors (serving visits only some). Runs
            end where the response ends.
    """

    loss: float
    accuracy: list[float]
    eal: float


def draw_anchors(loss_mask: Tensor, num_anchors: int, generator: torch.Generator) -> Tensor:
    """Draw anchors of one sequence without replacement.

    A position can be an anchor when it and the next one are supervised.

    Args:
        loss_mask: ``[T]`` bool.
        num_anchors: at most so many.
        generator: CPU generator.

    Returns:
        Sorted positions ``[m]`` int64; empty when there is no candidate.
    """
    candidates = (loss_mask[:-1] & loss_mask[1:]).nonzero().flatten()
    order = torch.randperm(candidates.shape[0], generator=generator)[:num_anchors]
    return candidates[order].sort().values


def position_weights(draft_block_size: int, gamma: float) -> Tensor:
    """Return ``[N]``: ``exp(-(k-1)/gamma)`` for k = 1..N."""
    return torch.exp(-torch.arange(draft_block_size - 1, dtype=torch.float32) / gamma)


def draw_sizes(
    num_blocks: int, draft_block_size: int, narrow_share: float, generator: torch.Generator
) -> Tensor:
    """Draw the size of each block ``[num_blocks]``: B, or for ``narrow_share`` of them 2..B-1.

    A drafter that has only seen whole blocks drafts badly in narrower ones, and serving needs them:
    policies ``static:<w>`` with a smaller w, and the end of every request.
    """
    if narrow_share == 0 or draft_block_size < 3:
        return torch.full((num_blocks,), draft_block_size)
    is_narrow = torch.rand(num_blocks, generator=generator) < narrow_share
    narrow = torch.randint(2, draft_block_size, (num_blocks,), generator=generator)
    return torch.where(is_narrow, narrow, draft_block_size)


def lay_out(
    batch: Batch, anchors: list[Tensor], draft_block_size: int, sizes: list[Tensor] | None = None
) -> DraftBlocks:
    """Build the draft blocks of a batch.

    Args:
        batch: R sequences.
        anchors: R tensors of positions.
        draft_block_size: B.
        sizes: R tensors as long as ``anchors``; None makes every block whole.
    """
    counts = torch.tensor([a.shape[0] for a in anchors])
    rows = torch.repeat_interleave(torch.arange(len(anchors)), counts)  # [M]
    positions = torch.cat(anchors)  # [M]
    ahead = positions[:, None] + torch.arange(1, draft_block_size)  # [M, N]
    is_inside = ahead < batch.lengths[rows][:, None]
    clamped = ahead.clamp(max=batch.input_ids.shape[1] - 1)
    widths = torch.full_like(positions, draft_block_size) if sizes is None else torch.cat(sizes)
    is_visible = torch.arange(1, draft_block_size) < widths[:, None]  # [M, N]
    is_supervised = is_inside & is_visible & batch.loss_mask[rows[:, None], clamped]
    labels = torch.where(is_inside, batch.input_ids[rows[:, None], clamped], 0)
    anchor_ids = batch.input_ids[rows, positions]
    return DraftBlocks(rows, positions, anchor_ids, labels, is_supervised, widths)


def draft_hidden(
    model: DraftModel, tables: TargetTables, features: Tensor, blocks: DraftBlocks
) -> Tensor:
    """Run the draft model over draft blocks.

    Args:
        model: created with the attention function ``dflash_training``.
        tables: the target's embedding and head.
        features: ``[R, T, K*H]``.
        blocks: M draft blocks of these rows.

    Returns:
        ``[M, N, H]``: rows of the masked positions.
    """
    size = model.draft_block_size
    num_rows = features.shape[0]
    num_context = int(blocks.anchors.max())  # nothing behind the last anchor is ever seen
    features = features[:, :num_context]
    context = model.project(features.flatten(0, 1).to(model.fc.weight.dtype))  # [R*S, H]
    positions = torch.arange(num_context, device=features.device).repeat(num_rows)
    keys_values = model.context_kv(context, positions)  # [L, R*S, 2, G, D]
    block_context = make_block_context(
        keys_values, num_rows, blocks.rows, blocks.anchors, size, blocks.sizes
    )
    block_ids = torch.full(
        (blocks.rows.shape[0], size), model.mask_token_id, device=features.device
    )
    block_ids[:, 0] = blocks.anchor_ids
    block_positions = blocks.anchors[:, None] + torch.arange(size, device=features.device)  # [M, B]
    embeddings = functional.embedding(block_ids.flatten(), tables.embedding)[None]  # [1, M*B, H]
    embeddings = embeddings.to(model.fc.weight.dtype)
    hidden = model(embeddings, block_positions.flatten()[None], block_context=block_context)
    masked: Tensor = hidden[0].unflatten(0, (-1, size))[:, 1:]
    return masked


def score_blocks(
    hidden: Tensor, lm_head: Tensor, blocks: DraftBlocks, weights: Tensor, chunk: int
) -> BlockScores:
    """Compare predictions with labels.

    Args:
        hidden: ``[M, N, H]``.
        lm_head: ``[V, H]``.
        blocks: labels and supervision.
        weights: ``[N]`` from ``position_weights``.
        chunk: draft blocks whose logits exist at one time; with several chunks the backward pass
            computes them again.
    """
    pieces = list(
        zip(
            hidden.split(chunk),
            blocks.labels.split(chunk),
            blocks.is_supervised.split(chunk),
            strict=True,
        )
    )
    losses, corrects = [], []
    for piece, labels, mask in pieces:
        arguments = (piece, lm_head, labels, mask * weights)
        if len(pieces) > 1 and torch.is_grad_enabled():
            loss, correct = checkpoint(_score_chunk, *arguments, use_reentrant=False)
        else:
            loss, correct = _score_chunk(*arguments)
        losses.append(loss)
        corrects.append(correct & mask)
    is_correct = torch.cat(corrects)  # [M, N]
    return BlockScores(
        loss=torch.stack(losses).sum(),
        weight=(blocks.is_supervised * weights).sum(),
        num_correct=is_correct.sum(0),
        num_supervised=blocks.is_supervised.sum(0),
        run_total=leading_runs(is_correct).sum(),
        num_blocks=hidden.shape[0],
    )


def leading_runs(is_correct: Tensor) -> Tensor:
    """Return ``[M]``: how many leading positions of each row of ``[M, N]`` are true."""
    return is_correct.long().cumprod(dim=1).sum(dim=1)


def _score_chunk(
    hidden: Tensor, lm_head: Tensor, labels: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the weighted loss sum and ``[m, N]`` whether the best token is the label."""
    if not torch.is_autocast_enabled(hidden.device.type):
        lm_head = lm_head.to(hidden.dtype)
    logits = functional.linear(hidden, lm_head)  # [m, N, V]
    flat = logits.flatten(0, 1).float()
    losses = functional.cross_entropy(flat, labels.flatten(), reduction="none")
    is_correct = flat.detach().argmax(-1).view_as(labels) == labels
    return (losses * weights.flatten()).sum(), is_correct
