"""The config of vLLM speculators, from and to z-lab's keys.

Differences: the decoder's keys are nested in ``transformer_layer_config``; tapped layers are counted as
hidden states, the embedding being 0, so layer l is l + 1; a flag says whether sliding layers are causal (full
ones never are); a draft vocabulary comes with a head of its own.
"""

from __future__ import annotations

from typing import Any

from dflash_wire.errors import ConfigError
from drafter.checkpoint.keys import (
    DECODER_KEYS,
    GENERAL_KEYS,
    refuse_other_decoders,
    refuse_unknown,
)
from drafter.checkpoint.zlab import ARCHITECTURE, ARCHITECTURE_2, DFLASH_2_KEYS, architecture_of
from drafter.settings import DraftSettings

MODEL_TYPE_KEY = "speculators_model_type"
DFLASH, DFLASH_2 = "dflash", "dflash2"
ARCHITECTURES = {DFLASH: "DFlashSpeculator", DFLASH_2: "DFlash2DraftModel"}
DEFAULT_BLOCK, DEFAULT_DRAFT_VOCAB = 8, 32000
DFLASH_2_DEFAULTS = dict(zip(DFLASH_2_KEYS, (2, 16, 256, 16), strict=True))
LAYER_CONFIG, PAIRING = "transformer_layer_config", "speculators_config"
KNOWN = GENERAL_KEYS | {
    MODEL_TYPE_KEY,
    LAYER_CONFIG,
    PAIRING,
    "aux_hidden_state_layer_ids",
    "block_size",
    "draft_vocab_size",
    "mask_token_id",
    "sample_from_anchor",
    "sliding_window_non_causal",
    "speculators_version",
    "target_hidden_size",
}


def from_speculators(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Translate a speculators config to z-lab's keys.

    Args:
        values: of ``config.json``.
        where: for messages.

    Raises:
        ConfigError: another algorithm, or keys that are missing or not known.
    """
    kind = values[MODEL_TYPE_KEY]
    if kind not in ARCHITECTURES:
        raise ConfigError(
            f"{where}: {MODEL_TYPE_KEY} is {kind!r}; only {', '.join(ARCHITECTURES)} are supported"
        )
    is_second = kind == DFLASH_2
    refuse_unknown(values, KNOWN | set(DFLASH_2_KEYS if is_second else ()), where)
    decoder = values.get(LAYER_CONFIG)
    if not isinstance(decoder, dict):
        raise ConfigError(f"{where} has no {LAYER_CONFIG}")
    refuse_other_decoders(decoder, f"{where}: {LAYER_CONFIG}")
    refuse_unknown(decoder, DECODER_KEYS | GENERAL_KEYS, f"{where}: {LAYER_CONFIG}")
    taps = values.get("aux_hidden_state_layer_ids")
    if not taps:
        raise ConfigError(f"{where} has no aux_hidden_state_layer_ids")
    if 0 in taps:
        raise ConfigError(
            f"{where}: hidden state 0 is the embedding, which cannot be tapped: {taps}"
        )
    nested: dict[str, Any] = {
        "target_layer_ids": [tap - 1 for tap in taps],
        "mask_token_id": values.get("mask_token_id"),
    }
    if is_second:
        nested |= {key: values.get(key, default) for key, default in DFLASH_2_DEFAULTS.items()}
    translated = {key: value for key, value in decoder.items() if key in DECODER_KEYS}
    translated |= {
        "architectures": [ARCHITECTURE_2 if is_second else ARCHITECTURE],
        "block_size": values.get("block_size", DEFAULT_BLOCK),
        "dflash_config": nested,
        "draft_vocab_size": values.get("draft_vocab_size", DEFAULT_DRAFT_VOCAB),
        "sample_from_anchor": values.get("sample_from_anchor"),
        "target_hidden_size": values.get("target_hidden_size"),
    }
    if values.get("sliding_window_non_causal", is_second):
        translated["is_causal"] = False
    pairing = values.get(PAIRING) or {}
    if (algorithm := pairing.get("algorithm", kind)) != kind:
        raise ConfigError(f"{where}: the algorithm is {algorithm!r} but {MODEL_TYPE_KEY} {kind!r}")
    verifier = pairing.get("verifier") or {}
    for key in ("name_or_path", "architectures"):
        if verifier.get(key):
            translated[f"verifier_{key}"] = verifier[key]
    return {key: value for key, value in translated.items() if value is not None}


def to_speculators(
    values: dict[str, Any], settings: DraftSettings, decoder: dict[str, Any]
) -> dict[str, Any]:
    """Translate z-lab's keys to a speculators config.

    Args:
        values: z-lab's.
        settings: what they mean.
        decoder: the complete decoder config.

    Raises:
        ConfigError: the layout has no key for something that this drafter needs.
    """
    is_second = architecture_of(values) == ARCHITECTURE_2
    _refuse_inexpressible(settings, is_second)
    kind = DFLASH_2 if is_second else DFLASH
    vocab_size = decoder["vocab_size"]
    translated: dict[str, Any] = {
        MODEL_TYPE_KEY: kind,
        "architectures": [ARCHITECTURES[kind]],
        LAYER_CONFIG: {key: decoder[key] for key in sorted(DECODER_KEYS & set(decoder))}
        | {"model_type": "qwen3"},
        "draft_vocab_size": settings.draft_vocab_size or vocab_size,
        "block_size": settings.draft_block_size,
        "target_hidden_size": decoder["hidden_size"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in settings.target_layer_ids],
        "mask_token_id": settings.mask_token_id,
        "sliding_window_non_causal": not any(_is_causal(settings)),
        "sample_from_anchor": False,
        PAIRING: {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": settings.draft_block_size - 1,
                }
            ],
            "verifier": {
                "name_or_path": values.get("verifier_name_or_path"),
                "architectures": values.get("verifier_architectures") or [],
            },
        },
    }
    if settings.convolution is not None and settings.selector is not None:
        sizes = [settings.convolution.kernel_size, settings.convolution.group_size]
        sizes += [settings.selector.rank, settings.selector.top_k]
        translated |= dict(zip(DFLASH_2_KEYS, sizes, strict=True))
    return translated


def _is_causal(settings: DraftSettings) -> list[bool]:
    return [reach.is_causal for reach in settings.reaches]


def _refuse_inexpressible(settings: DraftSettings, is_second: bool) -> None:
    """Keys that speculators lacks must be neutral."""
    sliding = [reach.is_causal for reach in settings.reaches if reach.window is not None]
    full = [reach.is_causal for reach in settings.reaches if reach.window is None]
    has_part = (settings.convolution is None) != (settings.selector is None)
    for is_there, what in (
        (settings.embedding_scale != 1.0, f"input_embedding_scale {settings.embedding_scale}"),
        (settings.output_multiplier != 1.0, f"output_multiplier {settings.output_multiplier}"),
        (settings.logit_softcap, f"final_logit_softcapping {settings.logit_softcap}"),
        (any(full), "causal layers without a window"),
        (len(set(sliding)) > 1, "sliding layers of which some are causal"),
        (settings.has_own_embedding, "an embedding of its own"),
        (settings.has_own_head and settings.draft_vocab_size is None, "a whole head of its own"),
        (
            is_second and settings.draft_vocab_size is not None,
            "a draft vocabulary beside a selector",
        ),
        (has_part, "convolutions without a selector or the reverse"),
    ):
        if is_there:
            raise ConfigError(f"speculators' layout cannot express {what}")
