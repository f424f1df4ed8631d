"""Optimizers of a run, by name."""

from __future__ import annotations

import torch
from torch import nn

from drafter.training.config import TrainingConfig


def make_optimizers(model: nn.Module, config: TrainingConfig) -> list[torch.optim.Optimizer]:
    """Build what ``config.optimizer`` names.

    ``adamw`` is the paper's. ``muon`` takes the matrices (its step scaled to AdamW's size, so rates
    compare) and leaves the norms to AdamW.
    """
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    if config.optimizer == "adamw":
        return [_adamw([*matrices, *rest], config)]
    muon = torch.optim.Muon(
        matrices,
        lr=config.peak_lr,
        weight_decay=config.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return [muon, _adamw(rest, config)]


def _adamw(parameters: list[nn.Parameter], config: TrainingConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters,
        lr=config.peak_lr,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
    )
