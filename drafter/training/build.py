"""Make a fresh draft model that fits a target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config

from dflash_wire.errors import ConfigError
from drafter.model import DraftModel, default_target_layer_ids
from drafter.training.attention import ATTENTION_NAME
from drafter.training.capture import decoder_layers

COPIED_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_parameters",
)


def find_mask_token_id(tokenizer: PreTrainedTokenizerBase, given: int | None = None) -> int:
    """Return the id that stands for "to be drafted"; it must never occur in text.

    Raises:
        ConfigError: none is given and the tokenizer has no mask token.
    """
    if given is not None:
        return given
    if tokenizer.mask_token_id is None:
        raise ConfigError(
            "the tokenizer has no mask token: pass --mask-token-id with a reserved, never emitted id"
        )
    return int(tokenizer.mask_token_id)


def build_draft_model(
    target: PreTrainedModel,
    *,
    num_layers: int,
    mask_token_id: int,
    draft_block_size: int,
    seed: int,
    num_taps: int | None = None,
    target_layer_ids: Sequence[int] | None = None,
) -> DraftModel:
    """Build a float32 draft model of the target's width, ready for training.

    Args:
        target: loaded target.
        num_layers: draft layers.
        mask_token_id: a reserved id.
        draft_block_size: anchor plus draft tokens.
        seed: of the initial weights.
        num_taps: tapped layers in the default spread; None: as many as draft layers.
        target_layer_ids: 0-based tapped layers, instead of the default spread.

    Raises:
        ConfigError: the target lacks a size, taps lie outside it, or it needs what the draft model
            does not implement.
    """
    depth = len(decoder_layers(target))
    text_config = target.config.get_text_config()
    values: dict[str, Any] = {key: getattr(text_config, key, None) for key in COPIED_KEYS}
    if values["head_dim"] is None:
        values["head_dim"] = text_config.hidden_size // text_config.num_attention_heads
    values["num_key_value_heads"] = values["num_key_value_heads"] or values["num_attention_heads"]
    values["rms_norm_eps"] = values["rms_norm_eps"] or 1e-6
    missing = [key for key, value in values.items() if value is None]
    if missing:
        raise ConfigError(f"the target's config has no {', '.join(missing)}")
    taps = list(target_layer_ids or default_target_layer_ids(depth, num_taps or num_layers))
    if not all(0 <= tap < depth for tap in taps):
        raise ConfigError(f"target_layer_ids {taps} lie outside the target's {depth} layers")
    values |= _embedding_scale(target)
    values |= {
        "num_hidden_layers": num_layers,
        "num_target_layers": depth,
        "block_size": draft_block_size,
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": taps},
        "tie_word_embeddings": False,
    }
    softcapping = getattr(text_config, "final_logit_softcapping", None)
    if softcapping:
        values["final_logit_softcapping"] = softcapping
    config = Qwen3Config.from_dict(values)
    config._attn_implementation = ATTENTION_NAME
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DraftModel(config)
    model.check_trainable()
    return model.float()


def _embedding_scale(target: PreTrainedModel) -> dict[str, Any]:
    """Some targets (Gemma) scale embedding rows in the module; the draft model does it itself."""
    scale = getattr(target.get_input_embeddings(), "embed_scale", None)
    return {} if scale is None else {"input_embedding_scale": float(scale)}
