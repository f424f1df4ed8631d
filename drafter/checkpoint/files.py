"""A checkpoint's files: config and tensors as they are stored, brought into one form."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dflash_ops.tensor_files import INDEX, indexed_files
from dflash_wire.errors import ConfigError
from drafter.checkpoint.speculators import MODEL_TYPE_KEY, from_speculators
from drafter.checkpoint.tensors import normalized, split_fused
from drafter.checkpoint.zlab import check_zlab

Z_LAB, SPECULATORS = "z-lab", "speculators"
CONFIG = "config.json"
MASK_EMBEDDING = "mask_embedding.pt"


@dataclass(slots=True)
class Checkpoint:
    """A drafter's config and weights, independent of the layout they were stored in."""

    layout: str
    """Where they come from."""
    values: dict[str, Any]
    """The config in z-lab's keys."""
    tensors: dict[str, Tensor]
    """By ``DraftModel``'s names, in the types they were stored in."""
    mask_embedding: Tensor | None
    """``[H]``, beside the tensors in a file of its own."""


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a local drafter checkpoint of either layout.

    Raises:
        ConfigError: files are missing or broken, or the config has something that is not implemented.
    """
    values = read_json(path / CONFIG, f"no draft checkpoint at {path}: {CONFIG} is missing")
    layout = Z_LAB
    if MODEL_TYPE_KEY in values:
        layout, values = SPECULATORS, from_speculators(values, str(path / CONFIG))
    else:
        check_zlab(values, str(path / CONFIG))
    tensors = split_fused(normalized(read_tensors(path)), values)
    return Checkpoint(layout, values, tensors, _read_mask_embedding(path, values))


def read_json(file: Path, missing: str) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ConfigError: there is none, with ``missing`` for a message if there is no file.
    """
    if not file.is_file():
        raise ConfigError(missing)
    try:
        values = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} is not a JSON object")
    return values


def _weight_files(path: Path) -> list[Path]:
    if (indexed := indexed_files(path)) is not None:
        files = sorted(set(indexed.values()))
        if missing := [file.name for file in files if not file.is_file()]:
            raise ConfigError(f"{path}: files named by {INDEX} are missing: {', '.join(missing)}")
        return files
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"no *.safetensors in {path}")
    return files


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a folder's tensors, in one file or in shards.

    Raises:
        ConfigError: there are none, a file cannot be read, or two have a tensor of one name.
    """
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(path):
        try:
            loaded = load_file(file)
        except SafetensorError as error:
            raise ConfigError(f"cannot read {file}: {error}") from error
        if twice := sorted(set(loaded) & set(tensors)):
            raise ConfigError(f"{file} has tensors that another file has: {', '.join(twice[:3])}")
        tensors.update(loaded)
    return tensors


def _read_mask_embedding(path: Path, values: dict[str, Any]) -> Tensor | None:
    """The optional side file; only tensors and plain values are read out of it, never code."""
    file = path / MASK_EMBEDDING
    if not file.is_file():
        return None
    try:
        stored = torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    if not isinstance(stored, dict) or not isinstance(stored.get("embedding"), Tensor):
        raise ConfigError(f"{file} has no tensor 'embedding'")
    if stored.get("per_position"):
        raise ConfigError(f"{file}: mask embeddings per position are not supported yet")
    nested = values.get("dflash_config") or {}
    mask_token_id = nested.get("mask_token_id", values.get("mask_token_id"))
    if stored.get("mask_token_id", mask_token_id) != mask_token_id:
        raise ConfigError(
            f"{file} is for mask_token_id {stored['mask_token_id']}, but config.json says {mask_token_id}"
        )
    embedding: Tensor = stored["embedding"].squeeze()
    if embedding.shape != (values.get("hidden_size"),):
        raise ConfigError(
            f"{file}: the embedding has shape {list(embedding.shape)} but hidden_size is "
            f"{values.get('hidden_size')}"
        )
    return embedding
