"""EAGLE-3 checkpoints: the layout of the public ones, and vLLM speculators'.

Public ones have the decoder's keys at top level, tensors of the layer under ``midlayer``, and say nothing of
the tapped layers where these are the usual three: near the target's beginning, in its middle and near its
end. Both count layers as hidden states, the embedding being 0, so layer l is l + 1.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_wire.errors import ConfigError
from drafter.checkpoint.files import CONFIG, SPECULATORS, read_json, read_tensors
from drafter.checkpoint.keys import GENERAL_KEYS, ROPE_SOURCES, refuse_unknown
from drafter.checkpoint.load import load_tensors
from drafter.checkpoint.speculators import LAYER_CONFIG, MODEL_TYPE_KEY, PAIRING
from drafter.checkpoint.tensors import normalized, split_fused
from drafter.eagle3.model import CONFIGS, Config, Eagle3Model, Eagle3Settings
from drafter.settings import check_rope

EAGLE3, PUBLIC = "eagle3", "EAGLE"
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
DEFAULT_DRAFT_VOCAB = 32000
"""Of speculators' layout."""
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
TAPS = "eagle_aux_hidden_state_layer_ids"
OWN = {*FLAGS, TAPS, "draft_vocab_size", "target_hidden_size"}
UNUSED_WINDOW = {"max_window_layers", "sliding_window", "use_sliding_window"}
"""What configs copied from a Qwen3 target carry; sliding itself is refused."""
NEUTRAL_EAGLE_VALUES: dict[str, tuple[Any, ...]] = {
    "parallel_draft_step": (None, 1),
    "use_aux_hidden_state": (None, True),
    "use_input_layernorm_in_first_layer": (None, True),
    "use_last_layernorm": (None, True),
    "use_mtp_layernorm": (None, False),
}
"""Keys of ``eagle_config`` of which only these values are implemented."""


def is_eagle3(values: dict[str, Any]) -> bool:
    """Whether a ``config.json`` is an EAGLE-3 drafter's."""
    if MODEL_TYPE_KEY in values:
        return bool(values[MODEL_TYPE_KEY] == EAGLE3)
    return any("eagle3" in str(name).lower() for name in values.get("architectures") or [])


def default_taps(num_target_layers: int) -> list[int]:
    """The 0-based layers tapped where a checkpoint names none."""
    return [1, num_target_layers // 2 - 1, num_target_layers - 4]


def load_eagle3_model(
    path: Path, dtype: torch.dtype, num_target_layers: int | None, draft_block_size: int
) -> Eagle3Model:
    """Load a local EAGLE-3 checkpoint of either layout (safetensors only).

    Args:
        path: folder.
        dtype: of the weights in memory.
        num_target_layers: depth of the target, for checkpoints that do not name their taps.
        draft_block_size: longest chain, anchor included.

    Raises:
        ConfigError: files are missing, tensors do not match the config, or the config has something that is
            not implemented.
    """
    where = str(path / CONFIG)
    values = read_json(path / CONFIG, f"no draft checkpoint at {path}: {CONFIG} is missing")
    decoder, own = _split(values, where)
    config = _config(decoder, where)
    tensors = _tensors(path, decoder)
    settings = _settings(own, config, tensors, num_target_layers, where)
    model = Eagle3Model(config, settings, draft_block_size)
    load_tensors(model, tensors, str(path))
    return model.to(dtype).eval()


def layout_of(values: dict[str, Any]) -> str:
    """Which of the two layouts a config has."""
    return SPECULATORS if MODEL_TYPE_KEY in values else PUBLIC


def _split(values: dict[str, Any], where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The decoder's keys, and EAGLE-3's own in one form."""
    if layout_of(values) == SPECULATORS:
        known = GENERAL_KEYS | OWN | {MODEL_TYPE_KEY, LAYER_CONFIG, PAIRING}
        refuse_unknown(values, known | {"speculators_version", "embed_requires_grad"}, where)
        decoder = values.get(LAYER_CONFIG)
        if not isinstance(decoder, dict):
            raise ConfigError(f"{where} has no {LAYER_CONFIG}")
        own = {"draft_vocab_size": DEFAULT_DRAFT_VOCAB}
        return decoder, own | {key: values[key] for key in OWN if values.get(key) is not None}
    nested = values.get("eagle_config") or {}
    for key, neutral in NEUTRAL_EAGLE_VALUES.items():
        if nested.get(key) not in neutral:
            raise ConfigError(
                f"{where}: eagle_config key {key!r} is not supported yet with value {nested[key]!r}"
            )
    refuse_unknown(nested, {*NEUTRAL_EAGLE_VALUES, TAPS}, f"{where}: eagle_config")
    own = {key: value for key, value in {**values, **nested}.items() if key in OWN}
    decoder = {key: value for key, value in values.items() if key not in {*OWN, "eagle_config"}}
    return decoder, {key: value for key, value in own.items() if value is not None}


def _config(decoder: dict[str, Any], where: str) -> Config:
    kind = decoder.get("model_type", "llama")
    if kind not in CONFIGS:
        raise ConfigError(
            f"{where}: model_type is {kind!r}; the draft layer must be one of {', '.join(CONFIGS)}"
        )
    known = {field.name for field in fields(CONFIGS[kind])} | ROPE_SOURCES | UNUSED_WINDOW
    refuse_unknown(decoder, known | GENERAL_KEYS, where)
    if decoder.get("use_sliding_window") or "sliding_attention" in (
        decoder.get("layer_types") or []
    ):
        raise ConfigError(f"{where}: EAGLE-3 layers that slide are not supported yet")
    if decoder.get("num_hidden_layers", 1) != 1:
        raise ConfigError(
            f"{where}: num_hidden_layers is {decoder['num_hidden_layers']}; only EAGLE-3 drafters of one "
            "layer are supported"
        )
    plain = {key: value for key, value in decoder.items() if key not in UNUSED_WINDOW}
    try:
        config: Config = CONFIGS[kind].from_dict({**plain, "num_hidden_layers": 1})
    except Exception as error:  # transformers has several kinds for values of a wrong type
        raise ConfigError(f"{where} is not a valid {kind} config: {error}") from error
    check_rope(config)
    return config


def _tensors(path: Path, decoder: dict[str, Any]) -> dict[str, Tensor]:
    """By ``Eagle3Model``'s names."""
    stored = split_fused(normalized(read_tensors(path)), decoder)
    return {
        f"layer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name: value
        for name, value in stored.items()
    }


def _settings(
    own: dict[str, Any],
    config: Config,
    tensors: dict[str, Tensor],
    num_target_layers: int | None,
    where: str,
) -> Eagle3Settings:
    """What the keys mean. Drops the map of a draft vocabulary that is the target's from ``tensors``."""
    hidden_size = own.get("target_hidden_size", config.hidden_size)
    if hidden_size != config.hidden_size:
        raise ConfigError(
            f"{where}: target_hidden_size is {hidden_size} but hidden_size is {config.hidden_size}; drafters "
            "of another width than their target are not supported yet"
        )
    draft_vocab_size = own.get("draft_vocab_size", config.vocab_size)
    is_whole = draft_vocab_size == config.vocab_size
    if is_whole and "d2t" in tensors and bool(tensors.pop("d2t").any()):
        raise ConfigError(f"{where}: d2t renames tokens of a draft vocabulary that is complete")
    return Eagle3Settings(
        target_layer_ids=_taps(own.get(TAPS), num_target_layers, where),
        num_target_layers=num_target_layers,
        norm_before_residual=bool(own.get("norm_before_residual", False)),
        norm_before_fc=bool(own.get("norm_before_fc", False)),
        has_feature_norms=bool(own.get("fc_norm", False)),
        norm_output=bool(own.get("norm_output", False)),
        draft_vocab_size=None if is_whole else int(draft_vocab_size),
        has_own_head="lm_head.weight" in tensors,
        has_own_embedding="embed_tokens.weight" in tensors,
    )


def _taps(given: list[int] | None, num_target_layers: int | None, where: str) -> list[int]:
    if given:
        taps = [int(layer) - 1 for layer in given]
    elif num_target_layers is None:
        raise ConfigError(f"{where} has no {TAPS}: name the target, its depth says which are usual")
    else:
        taps = default_taps(num_target_layers)
    if min(taps) < 0 or len(set(taps)) < len(taps):
        raise ConfigError(
            f"{where}: {TAPS} must be different layers, counted from 1: {[tap + 1 for tap in taps]}"
        )
    return taps
