"""A decoder layer's forward with fewer, larger operators, for eager inference on packed rows.

At a few tokens per pass the launch cost of small operators is most of a layer's time on a CPU: a
transformers layer runs about 60 of them. This one runs about 25: q, k and v in one product, gate and
up in one, normalisation and rotation of queries and keys together, residuals with the products.

Shape letters: T packed tokens, E hidden size, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from dflash_ops.attention import StepAttention, attend_packed
from dflash_ops.norms import RootMeanSquareNorm
from dflash_ops.products import joint_product
from dflash_ops.rotary import Rotation


class PackedLayer(Protocol):
    """A decoder layer on packed rows."""

    def __call__(self, hidden: Tensor, rotation: Rotation, step: StepAttention) -> Tensor:
        """``[T, E]`` -> ``[T, E]``; records this layer's K/V in ``step``."""


FUSIBLE_LAYERS = ("Qwen3DecoderLayer", "LlamaDecoderLayer")


class FusedDecoderLayer:
    """Inference-only forward of one Qwen3 or Llama decoder layer.

    Args:
        layer: a transformers decoder layer; it gives its weights up (``joint_product``).
    """

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._layer_idx: int = attention.layer_idx
        self._scale: float = attention.scaling
        self._head_dim: int = attention.head_dim
        self._num_heads: int = attention.q_proj.weight.shape[0] // self._head_dim
        self._num_kv_heads: int = attention.k_proj.weight.shape[0] // self._head_dim
        self._qkv = joint_product([attention.q_proj, attention.k_proj, attention.v_proj])
        self._out = joint_product([attention.o_proj])
        self._gate_up = joint_product([mlp.gate_proj, mlp.up_proj])
        self._down = joint_product([mlp.down_proj])
        self._activation = mlp.act_fn
        self._input_norm = RootMeanSquareNorm.of(layer.input_layernorm, self._qkv.input_scale)
        self._mlp_norm = RootMeanSquareNorm.of(
            layer.post_attention_layernorm, self._gate_up.input_scale
        )
        self._qk_norm: RootMeanSquareNorm | None = None
        if hasattr(attention, "q_norm"):
            q_weight = attention.q_norm.weight.detach().expand(self._num_heads, -1)
            k_weight = attention.k_norm.weight.detach().expand(self._num_kv_heads, -1)
            self._qk_norm = RootMeanSquareNorm(
                torch.cat([q_weight, k_weight]), attention.q_norm.variance_epsilon
            )

    def __call__(self, hidden: Tensor, rotation: Rotation, step: StepAttention) -> Tensor:
        """``[T, E]`` -> ``[T, E]``; records this layer's K/V in ``step``."""
        qkv = self._qkv.of_scaled(self._input_norm(hidden))
        hidden = self._out.added_to(hidden, self._attend(qkv, rotation, step))
        gate, up = self._gate_up.of_scaled(self._mlp_norm(hidden)).chunk(2, dim=-1)
        return self._down.added_to(hidden, self._activation(gate) * up)

    def _attend(self, projected: Tensor, rotation: Rotation, step: StepAttention) -> Tensor:
        """Queries, keys and values side by side ``[T, *]`` -> attended ``[T, H * D]``."""
        num_tokens, num_rotated = projected.shape[0], self._num_heads + self._num_kv_heads
        qkv = projected.view(num_tokens, -1, self._head_dim)
        qk = qkv[:, :num_rotated]
        if self._qk_norm is not None:
            qk = self._qk_norm(qk)
        qk = rotation.rotate(qk)
        step_kv = torch.cat([qk[:, self._num_heads :], qkv[:, num_rotated:]], dim=1)
        attended = attend_packed(
            qk[:, : self._num_heads],
            step_kv.view(num_tokens, 2, self._num_kv_heads, self._head_dim),
            step,
            self._layer_idx,
            self._scale,
        )
        return attended.reshape(num_tokens, -1)


class PlainDecoderLayer:
    """The same call on an unchanged transformers layer, whose attention must be ``GATHERED``."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __call__(self, hidden: Tensor, rotation: Rotation, step: StepAttention) -> Tensor:
        """``[T, E]`` -> ``[T, E]``; records this layer's K/V in ``step``."""
        out: Tensor = self._layer(hidden[None], position_embeddings=rotation.pair, step=step)[0]
        return out


def packed_layers(layers: Any) -> list[PackedLayer]:
    """Make a model's decoder layers callable on packed rows: fused where their kind is known."""
    return [
        FusedDecoderLayer(layer)
        if type(layer).__name__ in FUSIBLE_LAYERS
        else PlainDecoderLayer(layer)
        for layer in layers
    ]
