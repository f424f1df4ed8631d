"""Which file of a checkpoint's folder holds which tensor; reads names, never weights."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open

from dflash_wire.errors import ConfigError

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"


def indexed_files(folder: Path) -> dict[str, Path] | None:
    """Map the names of a checkpoint's tensors to shards, which need not be there; None: it has no index.

    Raises:
        ConfigError: the index is broken.
    """
    index = folder / INDEX
    if not index.is_file():
        return None
    try:
        values = json.loads(index.read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{index} is not JSON: {error}") from error
    placed = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(placed, dict):
        raise ConfigError(f"{index} has no weight_map")
    return {name: folder / file for name, file in placed.items()}


def tensor_files(folder: Path) -> dict[str, Path]:
    """Map the names of a checkpoint's tensors to their files, one file or shards.

    Raises:
        ConfigError: there are none, or their index is broken.
    """
    if (indexed := indexed_files(folder)) is not None:
        return indexed
    single = folder / WEIGHTS
    if not single.is_file():
        raise ConfigError(f"no {WEIGHTS} in target folder {folder}")
    with safe_open(single, framework="pt") as tensors:
        return dict.fromkeys(tensors.keys(), single)
