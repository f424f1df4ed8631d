"""A decoder layer's forward with fewer, larger operators, for eager inference on packed rows.

At a few tokens per pass the launch cost of small operators is most of a layer's time on a CPU: a
transformers layer runs about 60 of them. This one runs about 25: q, k and v in one product, gate and
up in one, normalisation and rotation of queries and keys together, residuals with the products.

Shape letters: T packed tokens, E hidden size, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash_ops.attention import StepAttention, attend_packed
from dflash_ops.norms import Norm, norm_of
from dflash_ops.products import Product, SummedProduct, joint_product
from dflash_ops.rotary import Rotation


class PackedLayer(Protocol):
    """A decoder layer on packed rows.

    Attributes:
        has_fixed_shapes: whether what it computes has shapes that depend on the number of tokens alone, so
            that it can be captured.
    """

    has_fixed_shapes: bool

    def __call__(self, hidden: Tensor, rotation: Rotation, step: StepAttention) -> Tensor:
        """``[T, E]`` -> ``[T, E]``; records this layer's K/V in ``step``."""


class FusedDecoderLayer:
    """Inference-only forward of one Qwen3 or Llama decoder layer.

    Args:
        layer: a transformers decoder layer; it gives its weights up (``joint_product``).
        summed: where several processes have a share each of the heads and of the MLP's columns, and the layer
            is this one's: adds up what all have. None: the layer is whole.
    """

    has_fixed_shapes = True

    def __init__(self, layer: Any, summed: Callable[[Tensor], Tensor] | None = None) -> None:
        attention = layer.self_attn
        self._summed = summed
        self._layer_idx: int = attention.layer_idx
        self._scale: float = attention.scaling
        self._head_dim: int = attention.head_dim
        self._num_heads: int = attention.q_proj.weight.shape[0] // self._head_dim
        self._num_kv_heads: int = attention.k_proj.weight.shape[0] // self._head_dim
        self._qkv = joint_product([attention.q_proj, attention.k_proj, attention.v_proj])
        self._out = self._last_product(attention.o_proj)
        self._input_norm = norm_of(layer.input_layernorm, self._qkv.input_scale)
        self._qk_norm: Norm | None = None
        if hasattr(attention, "q_norm"):
            heads = [(attention.q_norm, self._num_heads), (attention.k_norm, self._num_kv_heads)]
            self._qk_norm = norm_of(attention.q_norm, heads=heads)
        self._sinks: Tensor | None = None
        self._fuse_mlp(layer)

    def _fuse_mlp(self, layer: Any) -> None:
        """Take the MLP and the norm in front of it."""
        self._fuse_gated(layer.mlp, layer.post_attention_layernorm)

    def _fuse_gated(self, mlp: Any, norm: Any) -> None:
        self._gate_up = joint_product([mlp.gate_proj, mlp.up_proj])
        self._down = self._last_product(mlp.down_proj)
        self._activation = mlp.act_fn
        self._mlp_norm = norm_of(norm, self._gate_up.input_scale)

    def _last_product(self, linear: Any) -> Product:
        """What ends a sublayer."""
        product = joint_product([linear])
        return product if self._summed is None else SummedProduct(product, self._summed)

    def __call__(self, hidden: Tensor, rotation: Rotation, step: StepAttention) -> Tensor:
        """``[T, E]`` -> ``[T, E]``; records this layer's K/V in ``step``."""
        hidden = self._attended(hidden, rotation, step)
        gate, up = self._gate_up.of_scaled(self._mlp_norm(hidden)).chunk(2, dim=-1)
        return self._down.added_to(hidden, self._activation(gate) * up)

    def _attended(self, hidden: Tensor, rotation: Rotation, step: StepAttention) -> Tensor:
        """The attention sublayer with its residual."""
        qkv = self._qkv.of_scaled(self._input_norm(hidden))
        return self._out.added_to(hidden, self._attend(qkv, rotation, step))

    def _attend(self, projected: Tensor, rotation: Rotation, step: StepAttention) -> Tensor:
        """Queries, keys and values side by side ``[T, *]`` -> attended ``[T, H * D]``."""
        query, step_kv = self._rotated(projected, rotation)
        attended = attend_packed(query, step_kv, step, self._layer_idx, self._scale, self._sinks)
        return attended.reshape(projected.shape[0], -1)

    def _rotated(self, projected: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Queries ``[T, H, D]``, and keys and values ``[T, 2, G, D]``, as attention wants them."""
        num_tokens, num_rotated = projected.shape[0], self._num_heads + self._num_kv_heads
        qkv = projected.view(num_tokens, -1, self._head_dim)
        qk = qkv[:, :num_rotated]
        if self._qk_norm is not None:
            qk = self._qk_norm(qk)
        qk = rotation.rotate(qk)
        step_kv = torch.cat([qk[:, self._num_heads :], qkv[:, num_rotated:]], dim=1)
        shape = (num_tokens, 2, self._num_kv_heads, self._head_dim)
        return qk[:, : self._num_heads], step_kv.view(shape)


class PlainDecoderLayer:
    """The same call on an unchanged transformers layer, whose attention must be ``GATHERED``."""

    has_fixed_shapes = False

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __call__(self, hidden: Tensor, rotation: Rotation, step: StepAttention) -> Tensor:
        """``[T, E]`` -> ``[T, E]``; records this layer's K/V in ``step``."""
        out: Tensor = self._layer(hidden[None], position_embeddings=rotation.pair, step=step)[0]
        return out
