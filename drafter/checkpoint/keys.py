"""Which config keys are known. A key that is not may change what a drafter computes, so it is an error."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import Any

from transformers import PreTrainedConfig, Qwen3Config

from dflash_wire.errors import ConfigError
from drafter.settings import NEUTRAL_VALUES

ROPE_SOURCES = frozenset({"partial_rotary_factor", "rope_parameters", "rope_scaling", "rope_theta"})
DECODER_KEYS = frozenset(field.name for field in fields(Qwen3Config)) | ROPE_SOURCES
"""What a Qwen3 decoder is described by; ``Qwen3DecoderLayer`` reads them."""
GENERAL_KEYS = frozenset(PreTrainedConfig().to_dict()) | frozenset(
    [
        "_name_or_path",
        "architectures",
        "attn_implementation",
        "auto_map",
        "dtype",
        "is_decoder",
        "model_type",
        "pruned_heads",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "use_bfloat16",
    ]
)
"""What every config of transformers may have, and a draft model does not look at."""
DRAFT_KEYS = frozenset(NEUTRAL_VALUES) | frozenset(
    [
        "block_size",
        "causal",
        "conv_group_size",
        "conv_kernel_size",
        "draft_vocab_size",
        "final_logit_softcapping",
        "has_own_embed_tokens",
        "has_own_lm_head",
        "input_embedding_scale",
        "is_causal",
        "mask_token",
        "mask_token_id",
        "num_target_layers",
        "output_multiplier",
        "selector_rank",
        "selector_top_k",
        "swa_window_size",
        "target_hidden_size",
        "target_layer_ids",
        "use_swa",
    ]
)
"""What ``drafter.settings`` reads."""
PAIR_KEYS = frozenset({"verifier_architectures", "verifier_name_or_path"})
"""Which target a drafter was made for, as far as a checkpoint says; ours, for layouts that do."""


def refuse_unknown(values: dict[str, Any], known: Collection[str], where: str) -> None:
    """Refuse keys that are not known; those that are null say nothing and pass.

    Raises:
        ConfigError: names the keys and what can be done.
    """
    unknown = sorted(key for key, value in values.items() if key not in known and value is not None)
    if unknown:
        raise ConfigError(
            f"{where} has keys whose meaning is not known here: {', '.join(unknown)}. They may change what "
            "the drafter computes; remove those that do not"
        )


def refuse_other_decoders(values: dict[str, Any], where: str) -> None:
    """Refuse decoder layers that are not Qwen3's.

    Raises:
        ConfigError: names the type.
    """
    model_type = values.get("model_type", "qwen3")
    if model_type != "qwen3":
        raise ConfigError(f"{where}: model_type is {model_type!r}; draft layers must be 'qwen3'")
