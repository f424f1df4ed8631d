"""Fused RMS norms for eager CPU inference.

transformers' RMSNorm runs as five small operators; at a few tokens per pass their launch cost
dominates a layer. ``torch.nn.functional.rms_norm`` is one operator with the same float32 formula.
Only float32 modules are changed: in 16-bit types the two round at different places.
"""

from __future__ import annotations

from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm


def _fused_forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
    weight: Tensor = self.weight  # type: ignore[assignment]
    epsilon: float = self.variance_epsilon  # type: ignore[assignment]
    return rms_norm(hidden_states, weight.shape, weight, epsilon)


def fuse_rms_norms(model: nn.Module) -> int:
    """Replace the forward of plain float32 RMS norms in ``model``; mutates it.

    Returns:
        How many modules were changed. Norms with another formula (a ``1 + weight`` gain, a bias) are
        recognised by their missing ``variance_epsilon`` and left alone.
    """
    changed = 0
    for module in model.modules():
        is_plain = type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")
        if is_plain and module.weight.dtype == torch.float32:
            module.forward = MethodType(_fused_forward, module)
            changed += 1
    return changed
