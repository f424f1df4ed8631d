"""Tensor names: the aliases under which checkpoints store what ``DraftModel`` has."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor
from transformers import Qwen3Config

from dflash_wire.errors import ConfigError

PREFIXES = (
    ("model.", ""),
    ("midlayer.", "layers.0."),
    ("encoder.fc.", "fc."),
    ("encoder.output_norm_enc.", "hidden_norm."),
)
COPIES_OF_THE_TARGETS = ("verifier_lm_head.weight", "verifier_norm.weight")
"""Only training looks at these."""
COMPUTED = ("rotary_emb.inv_freq",)
CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
QKV, GATE_UP = "self_attn.qkv_proj.", "mlp.gate_up_proj."


def normalized(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors to ``DraftModel``'s names and leave out what can be computed.

    Raises:
        ConfigError: two tensors have the same name then.
    """
    renamed: dict[str, Tensor] = {}
    for stored_name, value in tensors.items():
        name = stored_name
        for prefix, replacement in PREFIXES:
            if name.startswith(prefix):
                name = replacement + name.removeprefix(prefix)
        if name.removesuffix(".weight") in CODEBOOKS:
            name = name.removesuffix(".weight")
        if name in COPIES_OF_THE_TARGETS or name.endswith(COMPUTED):
            continue
        if name in renamed:
            raise ConfigError(f"tensor {name} is stored twice, once as {stored_name}")
        renamed[name] = value
    return renamed


def split_fused(tensors: dict[str, Tensor], values: dict[str, Any]) -> dict[str, Tensor]:
    """Split products that are stored as one: queries, keys and values; gate and up.

    Args:
        tensors: with normalised names.
        values: config; only its sizes are read, and only where there is something to split.

    Raises:
        ConfigError: sizes do not fit the config's.
    """
    split: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if QKV in name:
            heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
            head_dim = values.get("head_dim") or Qwen3Config.head_dim
            sizes = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
            parts = {part: count * head_dim for part, count in sizes.items()}
        elif GATE_UP in name:
            parts = dict.fromkeys(("gate_proj", "up_proj"), values["intermediate_size"])
        else:
            split[name] = value
            continue
        if value.shape[0] != sum(parts.values()):
            raise ConfigError(
                f"tensor {name} has {value.shape[0]} rows, config.json makes it {sum(parts.values())}"
            )
        fused = re.search(r"(qkv_proj|gate_up_proj)", name)
        assert fused is not None
        for part, rows in zip(parts, value.split(list(parts.values())), strict=True):
            split[name.replace(fused[0], part)] = rows.contiguous()
    return split
