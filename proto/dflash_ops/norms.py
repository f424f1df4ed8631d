"""Root-mean-square norms with few operators, for eager inference on packed rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

ROUNDED_ONCE = ("Gemma", "GptOss")


class RootMeanSquareNorm:
    """``x / sqrt(mean(x^2) + epsilon) * weight`` over the last dimension.

    torch runs its own ``rms_norm`` as eight operators on a CPU; in float32 this is four, which at a few
    tokens per pass is twice as fast. Other types take torch's, which rounds once, at the end.

    Args:
        weight: ``[..., D]``; its leading dimensions, if any, are the input's last but one and so on.
        epsilon: added to the mean of squares.
    """

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        size = weight.shape[-1]
        self._weight = weight
        self._epsilon = epsilon
        self._is_float = weight.dtype == torch.float32
        self._gain = weight * math.sqrt(size)
        self._floor = torch.tensor(size * epsilon, dtype=weight.dtype, device=weight.device)

    @classmethod
    def of(cls, module: Any, factor: float = 1.0) -> RootMeanSquareNorm:
        """The norm of a transformers RMS norm module, its weight multiplied by ``factor``."""
        return cls(module.weight.detach() * factor, module.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, ..., D]`` of the weight's type -> the same shape."""
        if not self._is_float:
            return rms_norm(x, x.shape[-1:], None, self._epsilon) * self._weight
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.addcmul(self._floor, length, length).rsqrt_() * self._gain


class WideNorm:
    """The same with one rounding, at the very end: what Gemma and gpt-oss do in 16-bit types."""

    def __init__(self, gain: Tensor, epsilon: float) -> None:
        self._gain = gain.float()
        self._epsilon = epsilon

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, ..., D]`` -> the same shape and type."""
        return (rms_norm(x.float(), x.shape[-1:], None, self._epsilon) * self._gain).to(x.dtype)


Norm = RootMeanSquareNorm | WideNorm


def norm_of(module: Any, factor: float = 1.0, heads: Sequence[tuple[Any, int]] = ()) -> Norm:
    """The norm of a transformers RMS norm module of any family.

    Args:
        module: the norm; its epsilon counts for all.
        factor: multiplies the gain.
        heads: norms of one head size and how many heads each has, instead of the module's own gain; the
            norm's input is ``[T, heads, D]`` then.
    """
    gains = [_gain(norm).expand(count, -1) for norm, count in heads]
    gain = torch.cat(gains) if gains else _gain(module)
    epsilon = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    dtype = module.weight.dtype
    if dtype == torch.float32 or not type(module).__name__.startswith(ROUNDED_ONCE):
        return RootMeanSquareNorm(gain.to(dtype) * factor, epsilon)
    return WideNorm(gain * factor, epsilon)


def _gain(module: Any) -> Tensor:
    weight: Tensor = module.weight.detach()
    # Gemma stores how far the gain is from one.
    return 1.0 + weight.float() if type(module).__name__.startswith("Gemma") else weight
