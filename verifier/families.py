"""Which target families are served, and what their configs say about their layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from dflash_ops.attention import Reach
from dflash_wire.errors import ConfigError

SUPPORTED_MODEL_TYPES = ("qwen3", "llama", "qwen3_moe", "gemma3_text", "gpt_oss")
FULL, SLIDING = "full_attention", "sliding_attention"
# Their frequencies depend on the longest position of a pass, so on who shares the batch.
UNSUPPORTED_ROPE_TYPES = ("dynamic", "longrope")
UNSUPPORTED_VALUES = ("attn_logit_softcapping", "use_bidirectional_attention")


def load_target_config(path: str) -> Any:
    """Load and check the target's config.

    Raises:
        ConfigError: nothing there, or a family or feature that is not supported.
    """
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=Path(path).exists())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load a target model config from {path!r}: {error}") from error
    check_target_config(config)
    return config


def check_target_config(config: Any) -> None:
    """Refuse a target that would be computed wrongly.

    Raises:
        ConfigError: a family or feature that is not supported.
    """
    _refuse_running_state(config)
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise ConfigError(
            f"target family {config.model_type!r} is not supported; supported are "
            f"{', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    _refuse_quantised(config)
    kinds = layer_kinds(config)
    if unknown := set(kinds) - {FULL, SLIDING}:
        raise ConfigError(f"target layer types {sorted(unknown)} are not supported yet")
    if SLIDING in kinds and not getattr(config, "sliding_window", None):
        raise ConfigError("the target has sliding layers but no sliding_window")
    for kind, rope in ropes(config).items():
        if rope.get("rope_type") in UNSUPPORTED_ROPE_TYPES:
            raise ConfigError(
                f"target rope type {rope['rope_type']!r} ({kind}) is not supported yet"
            )
    for key in UNSUPPORTED_VALUES:
        if getattr(config, key, None):
            raise ConfigError(f"target config key {key!r} is not supported yet")


def _refuse_running_state(config: Any) -> None:
    """Layers that keep a running state cannot take a rejected token back."""
    text = config.get_text_config()
    kinds = {str(kind) for kind in getattr(text, "layer_types", None) or ()}
    kinds |= {str(kind) for kind in getattr(text, "layers_block_type", None) or ()}
    running = sorted(
        kind for kind in kinds if "linear" in kind or "mamba" in kind or "conv" in kind
    )
    if running:
        raise ConfigError(
            f"target family {config.model_type!r} has layers of types {', '.join(running)}, whose running "
            "state cannot take rejected drafts back; they are not supported yet (docs/adr/0018)"
        )


def _refuse_quantised(config: Any) -> None:
    """Layers are fused out of plain weights, and a quantised head would not be the drafter's."""
    values = getattr(config, "quantization_config", None) or {}
    method = values.get("quant_method") if isinstance(values, dict) else str(values)
    if method not in (None, "mxfp4"):  # as gpt-oss is published; transformers decides there
        raise ConfigError(
            f"target weights quantised by {method!r} are not supported; name a folder with plain ones"
        )


def layer_kinds(config: Any) -> list[str]:
    """The kind of every layer; families that do not name kinds slide everywhere or nowhere."""
    given = getattr(config, "layer_types", None)
    if given:
        return list(given)
    window = getattr(config, "sliding_window", None)
    return [SLIDING if window else FULL] * int(config.num_hidden_layers)


def layer_reaches(config: Any) -> list[Reach] | None:
    """What every layer's queries see of what rows show them; None when that is everything."""
    kinds = layer_kinds(config)
    if SLIDING not in kinds:
        return None
    return [Reach(config.sliding_window if kind == SLIDING else None) for kind in kinds]


def ropes(config: Any) -> dict[str, dict[str, Any]]:
    """Rope parameters by kind of layer; one entry ``all layers`` where they share them."""
    given = getattr(config, "rope_parameters", None) or {}
    by_kind = {kind: rope for kind, rope in given.items() if isinstance(rope, dict)}
    return by_kind or {"all layers": given}


def rotates_by_kind(config: Any) -> bool:
    """Whether kinds of layers have rope parameters of their own."""
    return "all layers" not in ropes(config)
