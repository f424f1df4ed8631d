"""The draft layer on packed pairs, and the projection of committed pairs to keys and values alone.

Shape letters: T pairs, K tapped target layers, H hidden, G key/value heads, D head size, N own tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dflash_ops.attention import StepAttention, attend_last
from dflash_ops.fused_layer import FusedDecoderLayer
from dflash_ops.norms import Norm, norm_of
from dflash_ops.products import product_of
from dflash_ops.rotary import Rotation
from drafter.eagle3.model import Eagle3Model


class FeatureProjection:
    """Features of K layers to one hidden state; keeps copies of the weights it needs."""

    def __init__(self, model: Eagle3Model) -> None:
        self._fc = product_of(model.fc.weight.detach())
        self._hidden_size = model.config.hidden_size
        self._whole = None if model.input_norm is None else norm_of(model.input_norm)
        self._each = None if model.fc_norm is None else [norm_of(norm) for norm in model.fc_norm]

    def __call__(self, features: Tensor) -> Tensor:
        """``[T, K*H]`` -> ``[T, H]``."""
        if self._whole is not None:
            features = self._whole(features)
        if self._each is not None:
            parts = features.split(self._hidden_size, dim=-1)
            features = torch.cat([n(p) for n, p in zip(self._each, parts, strict=True)], dim=-1)
        return self._fc(features)


class PairProjection:
    """Committed pairs to the layer's keys and values: what they attend to themselves is nobody's business.

    Args:
        layer: of a model that still has its weights; copies are kept.
    """

    def __init__(self, layer: Any) -> None:
        attention = layer.self_attn
        parts = [attention.k_proj, attention.v_proj]
        bias = None
        if parts[0].bias is not None:
            bias = torch.cat([part.bias.detach() for part in parts])
        self._product = product_of(torch.cat([part.weight.detach() for part in parts]), bias)
        self._token_norm, self._hidden_norm = (
            norm_of(layer.input_layernorm),
            norm_of(layer.hidden_norm),
        )
        self._head_dim: int = attention.head_dim
        num_kv_heads = attention.k_proj.out_features // self._head_dim
        self._key_norm: Norm | None = None
        if hasattr(attention, "k_norm"):
            self._key_norm = norm_of(attention.k_norm, heads=[(attention.k_norm, num_kv_heads)])

    def __call__(self, embeddings: Tensor, hidden: Tensor, rotation: Rotation) -> Tensor:
        """Tokens ``[T, H]`` and hidden states before them ``[T, H]`` -> ``[1, T, 2, G, D]``."""
        pairs = torch.cat([self._token_norm(embeddings), self._hidden_norm(hidden)], dim=-1)
        keys, values = self._product(pairs).unflatten(-1, (2, -1, self._head_dim)).unbind(1)
        if self._key_norm is not None:
            keys = self._key_norm(keys)
        return torch.stack([rotation.rotate(keys), values], dim=1)[None]


class PackedPairLayer(FusedDecoderLayer):
    """Inference-only forward of the draft layer, one pair per row behind the pairs drafted before.

    Args:
        layer: gives its weights up to the packed layer.
        norm_before_residual: see ``Eagle3Settings``.
    """

    def __init__(self, layer: Any, norm_before_residual: bool) -> None:
        super().__init__(layer)
        # Both halves share one product, but not one norm, so no factor of it is folded into them.
        self._token_norm = norm_of(layer.input_layernorm)
        self._hidden_norm = norm_of(layer.hidden_norm)
        self._norm_before_residual = norm_before_residual

    def next_hidden(
        self,
        embeddings: Tensor,
        hidden: Tensor,
        own_kv: Tensor | None,
        rotation: Rotation,
        step: StepAttention,
    ) -> tuple[Tensor, Tensor]:
        """Run one pair of every row.

        Args:
            embeddings: ``[R, H]`` of the tokens.
            hidden: ``[R, H]``, of the places before them.
            own_kv: ``[R, N, 2, G, D]`` of the row's pairs before; None: it is the first.
            rotation: of the tokens' positions.
            step: metadata of rows of width 1.

        Returns:
            hidden states ``[R, H]`` and ``own_kv`` with this pair's, ``[R, N + 1, 2, G, D]``.
        """
        normed = self._hidden_norm(hidden)
        pairs = torch.cat([self._token_norm(embeddings), normed], dim=-1)
        query, kv = self._rotated(self._qkv(pairs), rotation)
        own_kv = kv[:, None] if own_kv is None else torch.cat([own_kv, kv[:, None]], dim=1)
        attended = attend_last(query, own_kv, step, self._layer_idx, self._scale).flatten(1)
        hidden = self._out.added_to(normed if self._norm_before_residual else hidden, attended)
        gate, up = self._gate_up.of_scaled(self._mlp_norm(hidden)).chunk(2, dim=-1)
        return self._down.added_to(hidden, self._activation(gate) * up), own_kv
