"""Loads one rank's share of a target: whole checkpoints are never in memory, only slices of their files.

The share is an ordinary transformers model with fewer heads and narrower MLPs, so layers need not know about
ranks beyond the sum behind their last products. Embedding and norms are whole on every rank, the head on
rank 0 alone: nobody else chooses tokens.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from dflash_ops.attention import GATHERED
from dflash_ops.tensor_files import tensor_files
from dflash_wire.errors import ConfigError
from verifier.rank_group import RankGroup
from verifier.shard_rules import SPLIT_COUNTS, check_shardable

BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Linear layers of which every rank has some rows."""
BY_INPUTS = ("o_proj", "down_proj")
"""Those of which it has some columns; their results are partial sums."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load_shard(path: str, config: Any, dtype: torch.dtype, group: RankGroup) -> Any:
    """Load a rank's share of a Qwen3 or Llama target onto the CPU.

    Args:
        path: local folder with safetensors.
        config: the target's, checked by ``load_target_config``; not changed.
        dtype: of the weights.
        group: says which share.

    Returns:
        a transformers model whose ``config`` has this rank's numbers of heads and columns.

    Raises:
        ConfigError: the target cannot be split, or the folder lacks a tensor.
    """
    check_shardable(config.to_dict(), group.num_ranks)
    local = copy.deepcopy(config)
    local.head_dim = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    for name in SPLIT_COUNTS:
        setattr(local, name, getattr(config, name) // group.num_ranks)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            local, dtype=dtype, attn_implementation=GATHERED
        )
    reader = _ShareReader(Path(path), dtype, group)
    names = [name for name, _ in model.named_parameters() if name != HEAD]
    model.load_state_dict({name: reader.read(name) for name in names}, strict=False, assign=True)
    model.lm_head.weight = nn.Parameter(_head(model, config, reader, group), requires_grad=False)
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config)  # its tables are no parameters
    return model


def _head(model: Any, config: Any, reader: _ShareReader, group: RankGroup) -> Tensor:
    embedding: Tensor = model.model.embed_tokens.weight.detach()
    if group.rank != 0:
        return embedding[:0]
    if config.tie_word_embeddings:
        return embedding
    return reader.read(HEAD)


class _ShareReader:
    """Reads a rank's part of one tensor after another. Owner: ``load_shard``."""

    def __init__(self, folder: Path, dtype: torch.dtype, group: RankGroup) -> None:
        self._folder = folder
        self._files = tensor_files(folder)
        self._dtype = dtype
        self._group = group

    def read(self, name: str) -> Tensor:
        """Return the rank's part of a tensor.

        Raises:
            ConfigError: there is no such tensor, or it cannot be split.
        """
        if name not in self._files:
            raise ConfigError(f"{self._folder} has no tensor {name}")
        module, _, kind = name.rpartition(".")
        layer = module.rpartition(".")[2]
        with safe_open(self._files[name], framework="pt") as tensors:
            stored = tensors.get_slice(name)
            shape = stored.get_shape()
            if layer in BY_OUTPUTS:
                part = stored[self._share(name, shape[0])]
            elif layer in BY_INPUTS and kind == "weight":
                part = stored[:, self._share(name, shape[1])]
            else:
                part = tensors.get_tensor(name)
                if layer in BY_INPUTS and self._group.rank != 0:
                    part = torch.zeros_like(part)  # a bias counts once in the sum
        mine: Tensor = part.to(self._dtype).contiguous()
        return mine

    def _share(self, name: str, size: int) -> slice:
        if size % self._group.num_ranks:
            raise ConfigError(f"tensor {name} of {size} cannot be split by {self._group.num_ranks}")
        each = size // self._group.num_ranks
        return slice(self._group.rank * each, (self._group.rank + 1) * each)
