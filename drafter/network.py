"""What a DFlash draft model computes when it serves: context, hidden states, logits. It holds weights alone.

Shape letters: T packed tokens, K tapped target layers, H hidden, L draft layers, G key/value heads, D head
size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import embedding

from dflash_ops.attention import StepAttention
from dflash_ops.family_layers import packed_layers
from dflash_ops.fused_layer import PackedLayer
from dflash_ops.norms import RootMeanSquareNorm
from dflash_ops.rotary import RotaryTables
from drafter.borrowed import BorrowedWeights
from drafter.context import ContextProjection
from drafter.convolution import packed_draft_layers
from drafter.head import DraftHead
from drafter.model import DraftModel
from drafter.settings import heads_per_kv


class DraftNetwork:
    """Inference-only forward of a draft model.

    Args:
        model: draft model, its attention set to ``dflash_ops.attention.GATHERED``; its layers give
            their weights up.
        borrowed: the target's embedding and head.
        is_projected: see ``ContextProjection``.
    """

    def __init__(
        self, model: DraftModel, borrowed: BorrowedWeights, is_projected: bool = False
    ) -> None:
        self.model = model
        # Before the layers give their weights up.
        self._context = ContextProjection(model, is_projected)
        self.has_convolutions = model.settings.convolution is not None
        self.layers: Sequence[PackedLayer] = (
            packed_draft_layers(model.layers)
            if self.has_convolutions
            else packed_layers(model.layers)
        )
        self.reaches = None if model.settings.sees_all else model.settings.reaches
        """Of every layer; None where each sees all that rows show, which is the whole block."""
        self._rotary = RotaryTables(model.rotary_emb, model.norm.weight)
        self._norm = RootMeanSquareNorm.of(model.norm)
        self._head = DraftHead(model, borrowed.head)
        self.heads_per_kv = heads_per_kv(model.config)
        own_embedding = model.embed_tokens
        self._embedding = borrowed.embedding if own_embedding is None else own_embedding.weight

    def reserve_positions(self, num_positions: int) -> None:
        """Have rotations of so many positions ready, so that passes may find them on the device. Mutates."""
        self._rotary.reserve(num_positions)

    def context_kv(self, features: Tensor, positions: list[int] | Tensor) -> Tensor:
        """Target features ``[T, K*H]``, or projected ones ``[T, H]``, of absolute positions ->
        ``[L, T, 2, G, D]``."""
        return self._context(features, self._rotary.at(positions))

    def hidden(
        self, token_ids: Tensor, positions: list[int] | Tensor, step: StepAttention
    ) -> Tensor:
        """Draft layers and final norm over packed block tokens ``[T]`` int64: ``[T, H]``."""
        model = self.model
        hidden = embedding(token_ids, self._embedding)
        if model.mask_embedding is not None:
            is_mask = (token_ids == model.mask_token_id)[:, None]
            hidden = torch.where(is_mask, model.mask_embedding, hidden)
        hidden = hidden * model.embedding_scale
        rotation = self._rotary.at(positions)
        for layer in self.layers:
            hidden = layer(hidden, rotation, step)
        return self._norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[n, H]`` -> ``[n, V]``; -inf for the mask token and outside a draft vocabulary."""
        logits = self._head(hidden)
        # The mask token is a reserved id: the target never emits it, so neither may a draft.
        logits[:, self.model.mask_token_id].fill_(-torch.inf)
        return logits
