"""Decoder layers of other families on packed rows: mixtures of experts, sinks, norms behind sublayers.

Each differs from ``FusedDecoderLayer`` in one or two places and keeps the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from dflash_ops.attention import StepAttention
from dflash_ops.fused_layer import FusedDecoderLayer, PackedLayer, PlainDecoderLayer
from dflash_ops.norms import norm_of
from dflash_ops.rotary import Rotation


class PackedExpertsLayer(FusedDecoderLayer):
    """Qwen3-MoE and gpt-oss: transformers' own router and experts behind our attention.

    Experts of one pass are run one after another, each on the tokens that chose it.
    """

    has_fixed_shapes = False

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self._mlp = layer.mlp
        sinks = getattr(layer.self_attn, "sinks", None)
        self._sinks = None if sinks is None else sinks.detach()

    def _fuse_mlp(self, layer: Any) -> None:
        self._mlp_norm = norm_of(layer.post_attention_layernorm)

    def __call__(self, hidden: Tensor, rotation: Rotation, step: StepAttention) -> Tensor:
        """``[T, E]`` -> ``[T, E]``; records this layer's K/V in ``step``."""
        hidden = self._attended(hidden, rotation, step)
        out = self._mlp(self._mlp_norm(hidden)[None])
        mixed: Tensor = out[0] if isinstance(out, tuple) else out
        return hidden + mixed[0]


class PackedGemmaLayer(FusedDecoderLayer):
    """Gemma 3: norms behind each sublayer too."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self._after_attention = norm_of(layer.post_attention_layernorm)
        self._after_mlp = norm_of(layer.post_feedforward_layernorm)

    def _fuse_mlp(self, layer: Any) -> None:
        self._fuse_gated(layer.mlp, layer.pre_feedforward_layernorm)

    def __call__(self, hidden: Tensor, rotation: Rotation, step: StepAttention) -> Tensor:
        """``[T, E]`` -> ``[T, E]``; records this layer's K/V in ``step``."""
        qkv = self._qkv.of_scaled(self._input_norm(hidden))
        attended = self._out(self._attend(qkv, rotation, step))
        hidden = hidden + self._after_attention(attended)
        gate, up = self._gate_up.of_scaled(self._mlp_norm(hidden)).chunk(2, dim=-1)
        return hidden + self._after_mlp(self._down(self._activation(gate) * up))


PACKED: dict[str, Callable[[Any], PackedLayer]] = {
    "Qwen3DecoderLayer": FusedDecoderLayer,
    "LlamaDecoderLayer": FusedDecoderLayer,
    "Gemma3DecoderLayer": PackedGemmaLayer,
    "GptOssDecoderLayer": PackedExpertsLayer,
}


def packed_layers(
    layers: Any, summed: Callable[[Tensor], Tensor] | None = None
) -> list[PackedLayer]:
    """Make a model's decoder layers callable on packed rows: fused where their kind is known.

    Args:
        layers: transformers' own.
        summed: of ``FusedDecoderLayer``, for models all of whose layers are such; None: they are whole.
    """
    if summed is not None:
        return [FusedDecoderLayer(layer, summed) for layer in layers]
    return [_packed(layer) for layer in layers]


def _packed(layer: Any) -> PackedLayer:
    name = type(layer).__name__
    if name == "Qwen3MoeDecoderLayer":  # of which some layers may be dense
        return (
            PackedExpertsLayer(layer) if hasattr(layer.mlp, "experts") else FusedDecoderLayer(layer)
        )
    return PACKED.get(name, PlainDecoderLayer)(layer)
