"""A decoder layer's forward with fewer, larger operators, for eager inference on packed rows.

At a few tokens per pass the launch cost of small operators is most of a layer's time on a CPU: a
transformers layer runs about 60 of them. This one runs about 25: q, k and v in one product, gate and
up in one, normalisation and rotation of queries and keys together, residuals inside the products. The
weights stay the layer's own parameters (they become views of the fused ones), so nothing is doubled.

Shape letters: T packed tokens, E hidden size, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

from dflash_ops.attention import StepAttention, attend_packed

FUSIBLE_LAYERS = ("Qwen3DecoderLayer", "LlamaDecoderLayer")


def fuse_weights(linears: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Concatenate the weights (and biases) of layers with one input; mutates them into views.

    Returns:
        weight ``[sum of outputs, inputs]`` and bias, or None when no layer has one.
    """
    weight = torch.cat([layer.weight.detach() for layer in linears])
    start = 0
    for layer in linears:
        end = start + layer.weight.shape[0]
        layer.weight.data = weight[start:end]
        start = end
    if all(layer.bias is None for layer in linears):
        return weight, None
    return weight, torch.cat([layer.bias.detach() for layer in linears])


class RotaryTables:
    """Cosine and signed sine of a pass, shaped for ``[T, heads, D]``; built once for all layers.

    Args:
        cos: ``[1, T, D]`` from the model's rotary embedding.
        sin: ``[1, T, D]``.
    """

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.pair = (cos, sin)
        half = sin.shape[-1] // 2
        self._cos = cos[0][:, None]  # [T, 1, D]
        # The sign of rotate_half sits in the sine, so rotating is one product and one addition.
        self._sin = torch.cat([-sin[0][:, :half], sin[0][:, half:]], dim=-1)[:, None]

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate ``[T, heads, D]``."""
        half = x.shape[-1] // 2
        swapped = torch.cat([x[..., half:], x[..., :half]], dim=-1)
        return torch.addcmul(x * self._cos, swapped, self._sin)


class FusedDecoderLayer:
    """Inference-only forward of one Qwen3 or Llama decoder layer.

    Args:
        layer: a transformers decoder layer; its projections become views of the fused weights.
    """

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._layer_idx: int = attention.layer_idx
        self._scale: float = attention.scaling
        self._head_dim: int = attention.head_dim
        self._num_heads: int = attention.q_proj.weight.shape[0] // self._head_dim
        self._num_kv_heads: int = attention.k_proj.weight.shape[0] // self._head_dim
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        self._qkv, self._qkv_bias = fuse_weights(projections)
        self._gate_up, self._gate_up_bias = fuse_weights([mlp.gate_proj, mlp.up_proj])
        self._out, self._down, self._activation = attention.o_proj, mlp.down_proj, mlp.act_fn
        self._input_norm = layer.input_layernorm
        self._mlp_norm = layer.post_attention_layernorm
        self._qk_norm: Tensor | None = None  # [H + G, D]
        if hasattr(attention, "q_norm"):
            self._qk_norm = torch.cat(
                [
                    attention.q_norm.weight.detach().expand(self._num_heads, -1),
                    attention.k_norm.weight.detach().expand(self._num_kv_heads, -1),
                ]
            )
            self._qk_epsilon: float = attention.q_norm.variance_epsilon

    def __call__(self, hidden: Tensor, rotary: RotaryTables, step: StepAttention) -> Tensor:
        """``[T, E]`` -> ``[T, E]``; records this layer's K/V in ``step``."""
        num_tokens, num_rotated = hidden.shape[0], self._num_heads + self._num_kv_heads
        normed = self._norm(self._input_norm, hidden)
        qkv = linear(normed, self._qkv, self._qkv_bias).view(num_tokens, -1, self._head_dim)
        qk = qkv[:, :num_rotated]
        if self._qk_norm is not None:
            qk = rms_norm(qk, (self._head_dim,), None, self._qk_epsilon) * self._qk_norm
        qk = rotary.rotate(qk)
        step_kv = torch.cat([qk[:, self._num_heads :], qkv[:, num_rotated:]], dim=1)
        attended = attend_packed(
            qk[:, : self._num_heads],
            step_kv.view(num_tokens, 2, self._num_kv_heads, self._head_dim),
            step,
            self._layer_idx,
            self._scale,
        )
        hidden = self._project(self._out, attended.reshape(num_tokens, -1), hidden)
        gate, up = linear(
            self._norm(self._mlp_norm, hidden), self._gate_up, self._gate_up_bias
        ).chunk(2, dim=-1)
        return self._project(self._down, self._activation(gate) * up, hidden)

    @staticmethod
    def _norm(norm: Any, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)

    @staticmethod
    def _project(layer: nn.Linear, x: Tensor, residual: Tensor) -> Tensor:
        if layer.bias is not None:
            residual = residual + layer.bias
        return torch.addmm(residual, x, layer.weight.t())


class PlainDecoderLayer:
    """The same call on an unchanged transformers layer, whose attention must be ``GATHERED``."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __call__(self, hidden: Tensor, rotary: RotaryTables, step: StepAttention) -> Tensor:
        """``[T, E]`` -> ``[T, E]``; records this layer's K/V in ``step``."""
        out: Tensor = self._layer(hidden[None], position_embeddings=rotary.pair, step=step)[0]
        return out


def packed_layers(layers: Any) -> list[FusedDecoderLayer | PlainDecoderLayer]:
    """Make a model's decoder layers callable on packed rows: fused where their kind is known."""
    return [
        FusedDecoderLayer(layer)
        if type(layer).__name__ in FUSIBLE_LAYERS
        else PlainDecoderLayer(layer)
        for layer in layers
    ]
