"""Write a trained drafter in z-lab's layout and prove that it reads back."""

from __future__ import annotations

from pathlib import Path

import torch

from dflash_wire.errors import ConfigError
from drafter.checkpoint import load_draft_model, save_draft_model
from drafter.checkpoint.save import as_stored
from drafter.model import DraftModel
from drafter.training.attention import ATTENTION_NAME


def export_drafter(model: DraftModel, path: Path, dtype: torch.dtype = torch.bfloat16) -> int:
    """Write ``config.json`` and ``model.safetensors``; returns the number of parameters.

    Raises:
        ConfigError: what was written does not read back equal.
    """
    save_draft_model(model, path, dtype)
    again = load_draft_model(path, dtype, ATTENTION_NAME).state_dict()
    for name, value in model.state_dict().items():
        if not torch.equal(again[name], as_stored(value, dtype).cpu()):
            raise ConfigError(f"{path}: tensor {name} changed when it was written")
    return sum(p.numel() for p in model.parameters())
