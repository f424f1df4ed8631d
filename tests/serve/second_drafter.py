"""A second drafter for the demo target, made from the first."""

from __future__ import annotations

from pathlib import Path

import torch

from dflash_ops.attention import GATHERED
from drafter.checkpoint import load_draft_model, save_draft_model


def save_second_drafter(source: Path, path: Path, noise: float) -> None:
    """Write a copy that drafts worse, and taps another layer in place of one.

    Args:
        source: the checkpoint to begin with.
        path: the folder to write.
        noise: standard deviation of what is added, in those of each weight.
    """
    model = load_draft_model(source, torch.float32, GATHERED)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                scale = noise * weight.std()
                weight += scale * torch.randn(weight.shape, generator=generator)
    model.target_layer_ids = [layer + (layer == 5) for layer in model.target_layer_ids]
    save_draft_model(model, path, torch.float32)
