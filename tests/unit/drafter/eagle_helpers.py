"""Random EAGLE-3 drafters in both layouts, and engines around them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from drafter_helpers import (
    CPU,
    HEAD_DIM,
    HIDDEN,
    NUM_TARGET_LAYERS,
    PAGE_SIZE,
    VOCAB,
    random_weights,
)
from safetensors.torch import save_file
from torch import Tensor

from dflash_ops.paging import PagedPool
from drafter.checkpoint.eagle3 import load_eagle3_model
from drafter.eagle3.engine import Eagle3Drafter

KEPT = torch.tensor([2, 3, 11, 17, 18, 40, 41, 62])
"""Tokens of a draft vocabulary."""


def decoder_values(kind: str = "llama", **changes: Any) -> dict[str, Any]:
    """The decoder's keys."""
    return {
        "model_type": kind,
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 500.0,
        **changes,
    }


def random_tensors(
    values: dict[str, Any], own: dict[str, Any], num_taps: int = 3, seed: int = 0
) -> dict[str, Tensor]:
    """Every tensor that a checkpoint of these keys has, by the published names with ``midlayer``."""
    torch.manual_seed(seed)
    heads, kv_heads, head_dim = (
        values[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    draft_vocab_size = own.get("draft_vocab_size", VOCAB)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, num_taps * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (draft_vocab_size, HIDDEN),
        "midlayer.hidden_norm.weight": (HIDDEN,),
        "midlayer.input_layernorm.weight": (HIDDEN,),
        "midlayer.post_attention_layernorm.weight": (HIDDEN,),
        "midlayer.mlp.gate_proj.weight": (values["intermediate_size"], HIDDEN),
        "midlayer.mlp.up_proj.weight": (values["intermediate_size"], HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, values["intermediate_size"]),
        "midlayer.self_attn.q_proj.weight": (heads * head_dim, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": (kv_heads * head_dim, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": (kv_heads * head_dim, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": (HIDDEN, heads * head_dim),
    }
    if values["model_type"] == "qwen3":
        shapes |= dict.fromkeys(
            ("midlayer.self_attn.q_norm.weight", "midlayer.self_attn.k_norm.weight"), (head_dim,)
        )
    if values.get("attention_bias"):
        for name in ("q", "k", "v", "o"):
            shape = shapes[f"midlayer.self_attn.{name}_proj.weight"]
            shapes[f"midlayer.self_attn.{name}_proj.bias"] = shape[:1]
    if own.get("norm_before_fc"):
        shapes["input_norm.weight"] = (num_taps * HIDDEN,)
    if own.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (HIDDEN,) for i in range(num_taps)}
    tensors = {
        name: torch.randn(shape) * 0.2 + (1.0 if "norm" in name else 0.0)
        for name, shape in shapes.items()
    }
    if draft_vocab_size != VOCAB:
        tensors["d2t"] = KEPT - torch.arange(len(KEPT))
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
        tensors["t2d"][KEPT] = True
    return tensors


def save_public(path: Path, values: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write a checkpoint as EAGLE's authors publish them."""
    path.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["LlamaForCausalLMEagle3"], **values}
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def save_speculators(
    path: Path,
    values: dict[str, Any],
    own: dict[str, Any],
    tensors: dict[str, Tensor],
    taps: list[int] | None = None,
) -> Path:
    """Write the same drafter in speculators' layout.

    Args:
        taps: 0-based.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": values,
        "draft_vocab_size": VOCAB,
        **own,
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in taps or (1, 5, 8)],
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": None, "architectures": []},
        },
    }
    (path / "config.json").write_text(json.dumps(config))
    renamed = {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}
    save_file(renamed, path / "model.safetensors")
    return path


def save_random_eagle(path: Path, seed: int = 0, **changes: Any) -> Path:
    """A public checkpoint of plain settings; ``changes`` to the decoder's keys."""
    values = decoder_values(**changes)
    return save_public(path, values, random_tensors(values, {}, seed=seed))


def make_eagle(
    path: Path,
    num_rows: int = 64,
    num_pages: int = 32,
    num_lanes: int = 1,
    index: int = 0,
    taps: list[int] | None = None,
    num_taps: int = 3,
) -> Eagle3Drafter:
    """An engine whose pools start full of noise, so that a wrong read shows."""
    model = load_eagle3_model(path, torch.float32, NUM_TARGET_LAYERS, 16)
    config = model.config
    pool = PagedPool(
        1,
        num_lanes * num_pages,
        PAGE_SIZE,
        int(config.num_key_value_heads or 0),
        int(config.head_dim or 0),
        torch.float32,
        CPU,
    )
    generator = torch.Generator().manual_seed(11)
    pool.data.normal_(std=5.0, generator=generator)
    features = [
        torch.randn(num_rows, num_taps * HIDDEN, generator=generator) for _ in range(num_lanes)
    ]
    engine = Eagle3Drafter(model, random_weights(VOCAB), pool, features, index, taps)
    engine.carried.normal_(std=5.0, generator=generator)
    return engine
