"""Which file of a checkpoint's folder holds which tensor; reads names, never weights."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open

from dflash_wire.errors import ConfigError

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"


def tensor_files(folder: Path) -> dict[str, Path]:
    """Map the names of a checkpoint's tensors to their files, one file or shards.

    Raises:
        ConfigError: there are none.
    """
    if (folder / INDEX).is_file():
        placed: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        return {name: folder / file for name, file in placed.items()}
    single = folder / WEIGHTS
    if not single.is_file():
        raise ConfigError(f"no {WEIGHTS} in target folder {folder}")
    with safe_open(single, framework="pt") as tensors:
        return dict.fromkeys(tensors.keys(), single)
