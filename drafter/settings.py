"""What the config of a draft model means, checked: every key that changes what it computes.

The keys are z-lab's, looked up in ``dflash_config`` first and at top level then; other layouts are translated
to them (``drafter.checkpoint``). A key whose meaning is not implemented is an error, never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig, Qwen3Config

from dflash_ops.attention import Reach, Visible
from dflash_wire.errors import ConfigError

DEFAULT_DRAFT_BLOCK_SIZE = 16
FULL, SLIDING = "full_attention", "sliding_attention"
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1.0),
    "is_neox_style": (None, True),
    "projector_type": (None,),
    "rope_is_neox_style": (None, True),
    "sample_from_anchor": (None, False),
    "use_aux_hidden_state": (None, True),
    "use_gemma_norm": (None, False),
}
"""Keys of which only these values are implemented."""
# Their frequencies depend on the longest position of a pass, so on who shares the batch.
PASS_DEPENDENT_ROPES = ("dynamic", "longrope")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Positions of a draft block are plain numbers, which rotate alike in every section of a multimodal rope.
ROPE_KEYS = frozenset(
    [
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "low_freq_factor",
        "high_freq_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "mrope_section",
        "mrope_interleaved",
    ]
)


@dataclass(frozen=True, slots=True)
class ConvolutionSettings:
    """Grouped dynamic convolutions around the sublayers of DFlash 2."""

    kernel_size: int
    """Tokens that a convolution looks at: a token and those before it."""
    group_size: int
    """Channels that share one dynamic kernel."""


@dataclass(frozen=True, slots=True)
class SelectorSettings:
    """Candidate selector of DFlash 2."""

    rank: int
    top_k: int
    """Candidates of a slot."""


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """A draft model's settings beside those of its decoder layers.

    Attributes:
        target_layer_ids: K tapped layers, 0-based, in the order in which ``fc`` reads them.
        num_target_layers: depth of the target; None where the checkpoint does not say.
        draft_block_size: anchor plus draft tokens that it was trained for.
        mask_token_id: stands for a token to be drafted.
        embedding_scale: multiplies embedding rows.
        output_multiplier: multiplies logits, before the softcap.
        logit_softcap: ``c`` of ``c * tanh(z / c)``; None: none.
        reaches: what each layer's queries see.
        draft_vocab_size: size of a draft vocabulary; None: the target's.
        has_own_head: whether the checkpoint brings an output head.
        has_own_embedding: whether it brings an embedding table.
    """

    target_layer_ids: list[int]
    num_target_layers: int | None
    draft_block_size: int
    mask_token_id: int
    embedding_scale: float
    output_multiplier: float
    logit_softcap: float | None
    reaches: tuple[Reach, ...]
    draft_vocab_size: int | None
    has_own_head: bool
    has_own_embedding: bool
    convolution: ConvolutionSettings | None
    selector: SelectorSettings | None

    @property
    def sees_all(self) -> bool:
        """Whether every layer sees the whole context and block."""
        return set(self.reaches) == {Reach(visible=Visible.ALL)}

    @property
    def is_plain(self) -> bool:
        """Whether every layer sees the whole context and block, and nothing is added to the layers."""
        return self.sees_all and self.convolution is None


def draft_setting(config: Qwen3Config, name: str, default: Any = None) -> Any:
    """Look a DFlash key up in ``dflash_config`` first, then at top level."""
    nested = getattr(config, "dflash_config", None) or {}
    return nested.get(name, getattr(config, name, default))


def default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """Return the 0-based target layers tapped when a config names none: spread over 1..depth-3."""
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    first, last = 1, num_target_layers - 3
    step = (last - first) / (num_draft_layers - 1)
    return [round(first + i * step) for i in range(num_draft_layers)]


def read_settings(config: Qwen3Config) -> DraftSettings:
    """Read and check a draft model's config.

    Raises:
        ConfigError: names the key that is missing, wrong, or not implemented.
    """
    for key, neutral in NEUTRAL_VALUES.items():
        if (value := draft_setting(config, key)) not in neutral:
            raise ConfigError(f"draft config key {key!r} is not supported yet with value {value!r}")
    check_rope(config)
    target_hidden_size = draft_setting(config, "target_hidden_size")
    if target_hidden_size not in (None, config.hidden_size):
        raise ConfigError(
            f"target_hidden_size is {target_hidden_size} but hidden_size is {config.hidden_size}; "
            "drafters of another width than their target are not supported yet"
        )
    draft_block_size = int(draft_setting(config, "block_size", DEFAULT_DRAFT_BLOCK_SIZE))
    if draft_block_size < 2:
        raise ConfigError(f"block_size {draft_block_size} leaves no room for a draft token")
    draft_vocab_size = draft_setting(config, "draft_vocab_size")
    softcap = draft_setting(config, "final_logit_softcapping")
    num_target_layers = draft_setting(config, "num_target_layers")
    return DraftSettings(
        target_layer_ids=_target_layer_ids(config, num_target_layers),
        num_target_layers=num_target_layers,
        draft_block_size=draft_block_size,
        mask_token_id=_mask_token_id(config),
        embedding_scale=_number(config, "input_embedding_scale"),
        output_multiplier=_number(config, "output_multiplier"),
        logit_softcap=float(softcap) if softcap and float(softcap) > 0 else None,
        reaches=_reaches(config),
        draft_vocab_size=None if draft_vocab_size == config.vocab_size else draft_vocab_size,
        has_own_head=bool(draft_setting(config, "has_own_lm_head", False)),
        has_own_embedding=bool(draft_setting(config, "has_own_embed_tokens", False)),
        convolution=_convolution(config),
        selector=_selector(config),
    )


def _number(config: Qwen3Config, key: str) -> float:
    value = draft_setting(config, key)
    return 1.0 if value is None else float(value)


def _target_layer_ids(config: Qwen3Config, num_target_layers: int | None) -> list[int]:
    given = draft_setting(config, "target_layer_ids")
    if given:
        taps = [int(layer) for layer in given]
    elif num_target_layers is None:
        raise ConfigError("the draft config has neither target_layer_ids nor num_target_layers")
    else:
        taps = default_target_layer_ids(num_target_layers, config.num_hidden_layers)
    if min(taps) < 0 or len(set(taps)) < len(taps):
        raise ConfigError(f"target_layer_ids {taps} must be different layers, counted from 0")
    return taps


def _mask_token_id(config: Qwen3Config) -> int:
    mask_token_id = draft_setting(config, "mask_token_id")
    if mask_token_id is None:
        named = draft_setting(config, "mask_token")
        hint = f"; look up the id of its mask_token {named!r} and add it" if named else ""
        raise ConfigError(f"the draft config has no dflash_config.mask_token_id{hint}")
    if not 0 <= int(mask_token_id) < config.vocab_size:
        raise ConfigError(
            f"mask_token_id {mask_token_id} is outside the vocabulary of {config.vocab_size} tokens"
        )
    return int(mask_token_id)


def _reaches(config: Qwen3Config) -> tuple[Reach, ...]:
    """Causality: ``is_causal``, else ``causal``, else sliding layers alone are causal."""
    types = list(config.layer_types or [FULL] * config.num_hidden_layers)
    window = config.sliding_window
    if draft_setting(config, "use_swa"):
        types = [SLIDING] * config.num_hidden_layers
        window = draft_setting(config, "swa_window_size") or window
    if len(types) != config.num_hidden_layers:
        raise ConfigError(
            f"layer_types has {len(types)} entries but num_hidden_layers is {config.num_hidden_layers}"
        )
    if unknown := set(types) - {FULL, SLIDING}:
        raise ConfigError(f"draft layers of types {sorted(unknown)} are not supported")
    if SLIDING in types and not (window and window > 0):
        raise ConfigError(
            "draft layers slide but there is no window: check sliding_window and use_sliding_window"
        )
    override = draft_setting(config, "is_causal")
    if override is None:
        override = draft_setting(config, "causal")
    reaches = []
    for kind in types:
        is_causal = kind == SLIDING if override is None else bool(override)
        visible = Visible.CAUSAL if is_causal else Visible.ALL
        reaches.append(Reach(window if kind == SLIDING else None, visible))
    return tuple(reaches)


def check_rope(config: Any) -> None:
    """Refuse rotations that are not implemented.

    Args:
        config: of a Qwen3 or Llama decoder.

    Raises:
        ConfigError: names the key.
    """
    rope = dict(config.rope_parameters or {})
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        reason = " (it depends on who shares the batch)" if kind in PASS_DEPENDENT_ROPES else ""
        raise ConfigError(f"draft rope type {kind!r} is not supported yet{reason}")
    # With plain rope a factor is what came along from the target's config, and nobody applies it.
    whole_factor = (None, 1.0, rope.get("partial_rotary_factor") if kind == "default" else None)
    for key, whole in (
        ("partial_rotary_factor", whole_factor),
        ("rope_dim", (None, config.head_dim)),
    ):
        value = rope.pop(key, None)
        if value not in whole:
            raise ConfigError(f"draft rope key {key!r} is not supported yet with value {value!r}")
    if unknown := set(rope) - ROPE_KEYS:
        raise ConfigError(f"draft rope keys {sorted(unknown)} are not known")


def _together(config: Qwen3Config, *keys: str) -> list[int] | None:
    """Values of keys that are given together or not at all."""
    values = [draft_setting(config, key) for key in keys]
    if all(value is None for value in values):
        return None
    if not all(isinstance(value, int) and value > 0 for value in values):
        given = ", ".join(f"{k} {v!r}" for k, v in zip(keys, values, strict=True))
        raise ConfigError(f"these draft config keys belong together and count from 1: {given}")
    return [int(value) for value in values]


def _convolution(config: Qwen3Config) -> ConvolutionSettings | None:
    values = _together(config, "conv_kernel_size", "conv_group_size")
    if values is None:
        return None
    if config.hidden_size % values[1]:
        raise ConfigError(
            f"conv_group_size {values[1]} does not divide hidden_size {config.hidden_size}"
        )
    return ConvolutionSettings(*values)


def _selector(config: Qwen3Config) -> SelectorSettings | None:
    values = _together(config, "selector_rank", "selector_top_k")
    if values is None:
        return None
    if values[1] > config.vocab_size:
        raise ConfigError(
            f"selector_top_k {values[1]} is larger than the vocabulary of {config.vocab_size} tokens"
        )
    return SelectorSettings(*values)


def heads_per_kv(config: PretrainedConfig) -> int:
    """Query heads that share a key/value head."""
    num_heads = int(config.num_attention_heads)
    return num_heads // int(config.num_key_value_heads or num_heads)
