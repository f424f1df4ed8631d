"""What a target's folder adds to a drafter's checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from dflash_wire.errors import ConfigError
from drafter.borrowed import load_borrowed_weights
from drafter.checkpoint.files import SPECULATORS, Checkpoint

TEXT = "text_config"
SHARED = {
    "hidden_size": "hidden_size",
    "vocab_size": "vocab_size",
    "num_target_layers": "num_hidden_layers",
}


def _target_config(target: Path) -> dict[str, Any]:
    file = target / "config.json"
    if not file.is_file():
        raise ConfigError(f"no target at {target}: config.json is missing")
    values: dict[str, Any] = json.loads(file.read_text())
    return values


def target_values(target: Path) -> dict[str, int]:
    """The values of a target's config that its drafters must share.

    Raises:
        ConfigError: there is no config, or it lacks one.
    """
    values = _target_config(target)
    text = values.get(TEXT, values)
    missing = [key for key in SHARED.values() if key not in text]
    if missing:
        raise ConfigError(f"{target / 'config.json'} has no {', '.join(missing)}")
    return {name: int(text[key]) for name, key in SHARED.items()}


def complete_with(checkpoint: Checkpoint, target: Path, layout: str) -> None:
    """Add what a layout needs and only the target knows. Mutates ``checkpoint``.

    z-lab's layout wants the target's depth; speculators' wants a name, and the head's rows of a draft
    vocabulary.
    """
    values, config = checkpoint.values, _target_config(target)
    values.setdefault("num_target_layers", target_values(target)["num_target_layers"])
    values.setdefault("verifier_name_or_path", config.get("_name_or_path") or str(target))
    values.setdefault("verifier_architectures", config.get("architectures") or [])
    offsets = checkpoint.tensors.get("d2t")
    if layout == SPECULATORS and offsets is not None and "lm_head.weight" not in checkpoint.tensors:
        dtype = checkpoint.tensors["fc.weight"].dtype
        head = load_borrowed_weights(target, dtype, torch.device("cpu")).head
        checkpoint.tensors["lm_head.weight"] = head[offsets + torch.arange(offsets.shape[0])]
