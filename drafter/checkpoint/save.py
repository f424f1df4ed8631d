"""From a draft model to a checkpoint, and from one layout to the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash_ops.tensor_files import WEIGHTS
from dflash_wire.errors import ConfigError
from drafter.checkpoint.files import CONFIG, MASK_EMBEDDING, SPECULATORS, Z_LAB, Checkpoint
from drafter.checkpoint.load import OWN_HEAD, OWN_TENSORS, build_model
from drafter.checkpoint.speculators import to_speculators
from drafter.checkpoint.zlab import architecture_of
from drafter.model import DraftModel

LAYOUTS = (Z_LAB, SPECULATORS)
ANY_ATTENTION = "sdpa"


def save_draft_model(
    model: DraftModel, path: Path, dtype: torch.dtype, layout: str = Z_LAB
) -> None:
    """Write a model's ``config.json`` and ``model.safetensors``.

    Raises:
        ConfigError: the layout has no key for something that this drafter needs.
    """
    write_checkpoint(checkpoint_of(model, dtype), path, layout)


def checkpoint_of(model: DraftModel, dtype: torch.dtype) -> Checkpoint:
    """A model as a checkpoint whose tensors have type ``dtype``, except for ids."""
    config = model.config.to_dict()
    config.update(
        block_size=model.draft_block_size,
        dflash_config={
            **(getattr(model.config, "dflash_config", None) or {}),
            "mask_token_id": model.mask_token_id,
            "target_layer_ids": model.target_layer_ids,
        },
    )
    tensors = {name: as_stored(value, dtype) for name, value in model.state_dict().items()}
    mask_embedding = model.mask_embedding
    if mask_embedding is not None:
        mask_embedding = as_stored(mask_embedding, dtype)
    return Checkpoint(Z_LAB, config, tensors, mask_embedding)


def as_stored(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in the type it is stored in: ids stay integers."""
    return value.to(dtype).contiguous() if value.is_floating_point() else value.contiguous()


def write_checkpoint(checkpoint: Checkpoint, path: Path, layout: str) -> None:
    """Write a checkpoint in one of ``LAYOUTS``; tensors keep their types.

    Raises:
        ConfigError: the checkpoint is not consistent, the layout cannot express it, or the folder has other
            weights.
    """
    model = build_model(checkpoint, ANY_ATTENTION, str(path))
    dtype = checkpoint.tensors["fc.weight"].dtype
    stored: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch.")}
    tensors = {name: value for name, value in checkpoint.tensors.items() if name != "t2d"}
    if (token_ids := model.draft_token_ids()) is not None:
        tensors["t2d"] = torch.zeros(model.config.vocab_size, dtype=torch.bool)
        tensors["t2d"][token_ids] = True
    if layout == SPECULATORS:
        if token_ids is not None and model.lm_head is None:
            raise ConfigError(
                "speculators' layout wants the head of a draft vocabulary in the checkpoint: name the target"
            )
        stored |= to_speculators(checkpoint.values, model.settings, model.config.to_dict())
    elif model.settings.num_target_layers is None:
        raise ConfigError("z-lab's layout says how many layers the target has: name the target")
    else:
        stored |= _zlab_values(checkpoint)
    _make_room(path)
    (path / CONFIG).write_text(json.dumps(stored, indent=2, sort_keys=True) + "\n")
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    if checkpoint.mask_embedding is not None:
        side = {
            "embedding": checkpoint.mask_embedding,
            "mask_token_id": model.mask_token_id,
            "per_position": False,
        }
        torch.save(side, path / MASK_EMBEDDING)


def _make_room(path: Path) -> None:
    """Create the folder, or take out what would be read beside the new files.

    Raises:
        ConfigError: it has weights under other names.
    """
    path.mkdir(parents=True, exist_ok=True)
    (path / MASK_EMBEDDING).unlink(missing_ok=True)
    others = [file.name for file in path.glob("*.safetensors*") if file.name != WEIGHTS]
    if others:
        raise ConfigError(f"{path} has other weights, which would be read too: {sorted(others)}")


def _zlab_values(checkpoint: Checkpoint) -> dict[str, Any]:
    """The config as it was, except for what says how tensors are stored."""
    values = checkpoint.values
    dropped = {"dtype", "torch_dtype", *OWN_TENSORS}
    kept = {key: value for key, value in values.items() if key not in dropped}
    if OWN_TENSORS[OWN_HEAD] in checkpoint.tensors:
        kept[OWN_HEAD] = True  # other servers look for it
    return {**kept, "architectures": [architecture_of(values)], "model_type": "qwen3"}
