"""DFlash 2's grouped dynamic causal convolutions, and decoder layers with them.

Each sublayer (attention, MLP) has a convolution before it and one after it. A convolution mixes a token with
the few before it in the same draft block; its kernel is a learned base per channel plus, per group of
channels, a part computed from the sublayer's normalised input. It never crosses blocks and keeps nothing
between cycles; context does not pass through it.

Shape letters: T packed tokens, H hidden, S taps (a token and those before it), C groups of channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from dflash_ops.attention import StepAttention
from dflash_ops.fused_layer import FusedDecoderLayer
from dflash_ops.norms import RootMeanSquareNorm
from dflash_ops.products import product_of
from dflash_ops.rotary import Rotation
from drafter.settings import ConvolutionSettings


def convolve(x: Tensor, base: Tensor, dynamic: Tensor, places: Tensor) -> Tensor:
    """Mix each token with those before it in its block.

    Args:
        x: ``[T, H]``, blocks one after another.
        base: ``[S, H]``; index 0 weighs the token itself, 1 the one before it.
        dynamic: ``[T, S, C]``, added to the base of every channel of a group.
        places: ``[T]`` int64, each token's place in its block.

    Returns:
        ``[T, H]``.
    """
    grouped = x.unflatten(-1, (dynamic.shape[-1], -1))  # [T, C, H / C]
    bases = base.unflatten(-1, (dynamic.shape[-1], -1))  # [S, C, H / C]
    mixed: Tensor = grouped * (bases[0] + dynamic[:, 0, :, None])
    for tap in range(1, base.shape[0]):
        before = pad(grouped, (0, 0, 0, 0, tap, 0))[: x.shape[0]]
        is_inside = (places >= tap)[:, None, None]
        mixed = mixed + before * (bases[tap] + dynamic[:, tap, :, None]) * is_inside
    return mixed.flatten(1)


class GroupedConvolution(nn.Module):
    """The two convolutions of one sublayer; the identity until it is trained or loaded."""

    def __init__(self, hidden_size: int, settings: ConvolutionSettings) -> None:
        super().__init__()
        self.num_taps = settings.kernel_size
        self.num_groups = hidden_size // settings.group_size
        base = torch.zeros(2, self.num_taps, hidden_size)
        base[:, 0] = 1.0
        self.base_kernel = nn.Parameter(base)
        size = 2 * self.num_taps * self.num_groups
        self.kernel_projection = nn.Linear(hidden_size, size, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)


class ConvolvedDecoderLayer(Qwen3DecoderLayer):
    """A draft layer of DFlash 2. It holds the weights; ``PackedConvolvedLayer`` runs them."""

    def __init__(self, config: Qwen3Config, layer_idx: int, settings: ConvolutionSettings) -> None:
        super().__init__(config, layer_idx)
        self.attention_conv = GroupedConvolution(config.hidden_size, settings)
        self.mlp_conv = GroupedConvolution(config.hidden_size, settings)


class _Convolutions:
    """One sublayer's convolutions, inference only."""

    def __init__(self, module: GroupedConvolution) -> None:
        self._shape = (2, module.num_taps, module.num_groups)
        self._base = module.base_kernel.detach()
        self._kernels = product_of(module.kernel_projection.weight.detach())

    def before(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve a sublayer's input; also returns the dynamic kernel for its output."""
        kernels = self._kernels(x).unflatten(-1, self._shape)  # [T, 2, S, C]
        return convolve(x, self._base[0], kernels[:, 0], places), kernels[:, 1]

    def after(self, x: Tensor, dynamic: Tensor, places: Tensor) -> Tensor:
        """Convolve a sublayer's output."""
        return convolve(x, self._base[1], dynamic, places)


class PackedConvolvedLayer(FusedDecoderLayer):
    """Inference-only forward of a ``ConvolvedDecoderLayer``; the pass must know ``step.places``.

    Args:
        layer: gives its weights up to the packed layer.
    """

    def __init__(self, layer: ConvolvedDecoderLayer) -> None:
        super().__init__(layer)
        # The convolutions want the norms as they are, so no factor of the products is folded into them.
        self._plain_input_norm = RootMeanSquareNorm.of(layer.input_layernorm)
        self._plain_mlp_norm = RootMeanSquareNorm.of(layer.post_attention_layernorm)
        self._attention_conv = _Convolutions(layer.attention_conv)
        self._mlp_conv = _Convolutions(layer.mlp_conv)

    def __call__(self, hidden: Tensor, rotation: Rotation, step: StepAttention) -> Tensor:
        """``[T, E]`` -> ``[T, E]``; records this layer's K/V in ``step``."""
        places = step.places
        assert places is not None
        mixed, dynamic = self._attention_conv.before(self._plain_input_norm(hidden), places)
        attended = self._attend(self._qkv(mixed), rotation, step)
        hidden = hidden + self._attention_conv.after(self._out(attended), dynamic, places)
        mixed, dynamic = self._mlp_conv.before(self._plain_mlp_norm(hidden), places)
        gate, up = self._gate_up(mixed).chunk(2, dim=-1)
        out = self._down(self._activation(gate) * up)
        return hidden + self._mlp_conv.after(out, dynamic, places)


def packed_draft_layers(layers: Any) -> list[PackedConvolvedLayer]:
    """Make the layers of a DFlash 2 drafter callable on packed rows."""
    return [PackedConvolvedLayer(layer) for layer in layers]
