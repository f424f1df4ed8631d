"""What the drafter borrows from the target: its embedding table and output head.

Only these two tensors are read from the target's checkpoint, so a drafter on another GPU does not
load the target.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from dflash_ops.tensor_files import tensor_files
from dflash_wire.errors import ConfigError

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class BorrowedWeights:
    """``embedding [V, H]`` and ``head [V, H]``; the same tensor when the target ties them."""

    embedding: Tensor
    head: Tensor


def load_borrowed_weights(
    target: Path, dtype: torch.dtype, device: torch.device
) -> BorrowedWeights:
    """Read embedding and head from a local target checkpoint.

    Raises:
        ConfigError: the checkpoint has no embedding, or neither a head nor tied embeddings.
    """
    placed = tensor_files(target)
    files = {name: placed[name] for name in (EMBEDDING, HEAD) if name in placed}
    if EMBEDDING not in files:
        raise ConfigError(f"{target} has no tensor {EMBEDDING}")
    loaded: dict[str, Tensor] = {}
    for name, file in files.items():
        with safe_open(file, framework="pt") as tensors:
            loaded[name] = tensors.get_tensor(name).to(dtype).to(device)
    config = json.loads((target / "config.json").read_text())
    if config.get("tie_word_embeddings", HEAD not in loaded):
        return BorrowedWeights(loaded[EMBEDDING], loaded[EMBEDDING])
    if HEAD not in loaded:
        raise ConfigError(f"{target} has no tensor {HEAD} and does not tie its embeddings")
    return BorrowedWeights(loaded[EMBEDDING], loaded[HEAD])
