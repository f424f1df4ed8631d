"""Builds the two engines from plain specs; used by the actors and by in-process composition."""

from __future__ import annotations

from pathlib import Path

import torch

from dflash_ops.attention import GATHERED
from dflash_ops.paging import PagedPool
from dflash_wire.errors import ConfigError
from dflash_wire.ports import EngineLimits
from drafter.borrowed import load_borrowed_weights
from drafter.engine import DrafterEngine
from drafter.model import DraftModel, load_draft_model
from services.spec import EngineSpec
from verifier.engine import VerifierEngine
from verifier.target import TargetModel


def torch_dtype(spec: EngineSpec) -> torch.dtype:
    """``spec.dtype`` as torch's."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def load_target(spec: EngineSpec) -> TargetModel:
    """Load the target model of ``spec``."""
    return TargetModel(spec.target_path, torch_dtype(spec), torch.device(spec.device))


def load_drafter(spec: EngineSpec) -> DraftModel:
    """Load the draft model of ``spec`` on its device."""
    model = load_draft_model(Path(spec.drafter_path), torch_dtype(spec), GATHERED)
    return model.to(torch.device(spec.device))


def check_pair(target: TargetModel, draft_config: dict[str, int], taps: list[int]) -> None:
    """Refuse a drafter that was not made for this target.

    Raises:
        ConfigError: naming both values that differ.
    """
    for name, ours in (
        ("hidden_size", target.hidden_size),
        ("vocab_size", target.vocab_size),
        ("num_target_layers", target.num_layers),
    ):
        if draft_config[name] != ours:
            raise ConfigError(
                f"target and drafter do not match: {name} is {ours} in the target and "
                f"{draft_config[name]} in the drafter"
            )
    if max(taps) >= target.num_layers - 1:
        raise ConfigError(
            f"the drafter taps layer {max(taps)}, but the target's last tappable layer is "
            f"{target.num_layers - 2}"
        )


def draft_facts(model: DraftModel) -> dict[str, int]:
    """The config values that must agree with the target's."""
    config = model.config
    return {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_target_layers": config.num_target_layers,
    }


def engine_limits(spec: EngineSpec, max_positions: int, draft_block_size: int) -> EngineLimits:
    """What the coordinator may plan with."""
    return EngineLimits(
        num_pages=spec.num_pages,
        page_size=spec.page_size,
        max_step_positions=spec.max_step_positions,
        max_rows=spec.max_rows,
        max_context=spec.longest_sequence(max_positions),
        max_draft_block_size=draft_block_size,
    )


def build_verifier(
    spec: EngineSpec, target: TargetModel, feature_pool: torch.Tensor, taps: list[int]
) -> VerifierEngine:
    """Put a loaded target behind its KV pool."""
    pool = PagedPool(
        target.num_layers,
        spec.num_pages,
        spec.page_size,
        target.num_kv_heads,
        target.head_dim,
        target.dtype,
        target.device,
    )
    return VerifierEngine(target, pool, feature_pool, taps)


def build_drafter(spec: EngineSpec, model: DraftModel, feature_pool: torch.Tensor) -> DrafterEngine:
    """Put a loaded draft model behind its context pool."""
    config = model.config
    dtype, device = torch_dtype(spec), torch.device(spec.device)
    pool = PagedPool(
        config.num_hidden_layers,
        spec.num_pages,
        spec.page_size,
        int(config.num_key_value_heads or config.num_attention_heads),
        config.head_dim,
        dtype,
        device,
    )
    borrowed = load_borrowed_weights(Path(spec.target_path), dtype, device)
    return DrafterEngine(model, borrowed, pool, feature_pool)
