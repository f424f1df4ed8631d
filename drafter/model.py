"""The DFlash draft model in z-lab's checkpoint layout.

A draft layer *is* a transformers decoder layer: what makes it DFlash is where its attention finds
the context. Context keys and values come from target features through the layer's own ``k_proj``,
``k_norm`` and ``v_proj`` (never through its norms, ``o_proj`` or MLP); how they reach the attention
function is the caller's business (a paged pool when serving, a dense tensor when training), through
keyword arguments that the layers pass on.

Source: arXiv 2602.06036 section 4; tensor names and config keys as published by z-lab.

Shape letters: T tokens, H hidden, K tapped target layers, L draft layers, G key/value heads, D head size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from dflash_wire.errors import ConfigError

DEFAULT_DRAFT_BLOCK_SIZE = 16
ARCHITECTURE = "DFlashDraftModel"
UNSUPPORTED_KEYS = (
    "attention_sink_bias",
    "causal",
    "conv_kernel_size",
    "draft_vocab_size",
    "final_logit_softcapping",
    "has_own_lm_head",
    "projector_type",
    "selector_rank",
    "use_gemma_norm",
    "use_swa",
)
UNSUPPORTED_SCALES = ("attention_value_scale", "output_multiplier")


def default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """Return the 0-based target layers tapped when a config names none: spread over 1..depth-3."""
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    first, last = 1, num_target_layers - 3
    step = (last - first) / (num_draft_layers - 1)
    return [round(first + i * step) for i in range(num_draft_layers)]


def draft_setting(config: Qwen3Config, name: str, default: Any = None) -> Any:
    """Look a DFlash key up in ``dflash_config`` first, then at top level."""
    nested = getattr(config, "dflash_config", None) or {}
    return nested.get(name, getattr(config, name, default))


class DraftModel(nn.Module):
    """Draft layers, feature projection and norms; embedding and head are the target's.

    ``config._attn_implementation`` names a function in transformers' attention registry; it receives
    the keyword arguments given to ``forward``.

    Raises:
        ConfigError: the config has a key whose meaning this version does not implement.
    """

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        _refuse_unsupported(config)
        self.config = config
        self.target_layer_ids: list[int] = list(
            draft_setting(config, "target_layer_ids")
            or default_target_layer_ids(config.num_target_layers, config.num_hidden_layers)
        )
        self.draft_block_size = int(draft_setting(config, "block_size", DEFAULT_DRAFT_BLOCK_SIZE))
        self.mask_token_id = int(draft_setting(config, "mask_token_id"))
        self.embedding_scale = float(draft_setting(config, "input_embedding_scale", 1.0))
        hidden = config.hidden_size
        self.layers = nn.ModuleList(
            [Qwen3DecoderLayer(config, i) for i in range(config.num_hidden_layers)]
        )
        self.fc = nn.Linear(len(self.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = Qwen3RMSNorm(hidden, eps=config.rms_norm_eps)
        self.norm = Qwen3RMSNorm(hidden, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)

    def project(self, features: Tensor) -> Tensor:
        """Target features ``[T, K*H]`` -> context ``[T, H]``, shared by all layers."""
        context: Tensor = self.hidden_norm(self.fc(features))
        return context

    def context_kv(self, context: Tensor, positions: Tensor) -> Tensor:
        """Keys and values of context tokens in every layer.

        Args:
            context: ``[T, H]`` from ``project``.
            positions: ``[T]`` int64, absolute.

        Returns:
            ``[L, T, 2, G, D]``; index 0 of dim 2 is the rotated key, 1 the value.
        """
        cos, sin = self.rotary_emb(context[None], positions[None])  # [1, T, D]
        per_layer = []
        for layer in self.layers:
            attention: Any = layer.self_attn
            shape = (1, context.shape[0], -1, attention.head_dim)
            key = attention.k_norm(attention.k_proj(context).view(shape)).transpose(1, 2)
            _, key = apply_rotary_pos_emb(key, key, cos, sin)  # [1, G, T, D]
            value = attention.v_proj(context).view(shape)  # [1, T, G, D]
            per_layer.append(torch.stack([key[0].transpose(0, 1), value[0]], dim=1))
        return torch.stack(per_layer)

    def forward(self, embeddings: Tensor, positions: Tensor, **attention: Any) -> Tensor:
        """Run the draft layers over block tokens.

        Args:
            embeddings: ``[1, T, H]`` target embeddings of anchors and mask tokens (unscaled).
            positions: ``[1, T]`` int64, absolute.
            attention: passed to the attention function of every layer.

        Returns:
            ``[1, T, H]`` after the final norm. Row k of a block predicts the token *at* its own
            position; the anchor's row predicts nothing.
        """
        hidden = embeddings * self.embedding_scale
        position_embeddings = self.rotary_emb(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=position_embeddings, **attention)
        normed: Tensor = self.norm(hidden)
        return normed


def _refuse_unsupported(config: Qwen3Config) -> None:
    """Keys that change semantics are an error, never ignored."""
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"} or getattr(config, "is_causal", None):
        raise ConfigError(
            f"draft layers of types {sorted(layer_types)} are not supported yet; "
            "only bidirectional full_attention drafters are"
        )
    for key in UNSUPPORTED_KEYS:
        if draft_setting(config, key):
            raise ConfigError(f"draft config key {key!r} is not supported yet")
    for key in UNSUPPORTED_SCALES:
        if float(draft_setting(config, key, 1.0)) != 1.0:
            raise ConfigError(f"draft config key {key!r} other than 1.0 is not supported yet")
    mask_token_id = draft_setting(config, "mask_token_id")
    if mask_token_id is None:
        raise ConfigError("the draft config has no dflash_config.mask_token_id")
    if not 0 <= int(mask_token_id) < config.vocab_size:
        raise ConfigError(
            f"mask_token_id {mask_token_id} is outside the vocabulary of {config.vocab_size} tokens"
        )
    if getattr(config, "num_target_layers", None) is None:
        raise ConfigError("the draft config has no num_target_layers")


def save_draft_model(model: DraftModel, path: Path, dtype: torch.dtype) -> None:
    """Write ``config.json`` and ``model.safetensors`` in z-lab's layout."""
    path.mkdir(parents=True, exist_ok=True)
    config = model.config.to_dict()
    config.update(
        architectures=[ARCHITECTURE],
        block_size=model.draft_block_size,
        dtype=str(dtype).removeprefix("torch."),
        dflash_config={
            **(getattr(model.config, "dflash_config", None) or {}),
            "mask_token_id": model.mask_token_id,
            "target_layer_ids": model.target_layer_ids,
        },
    )
    (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tensors = {name: value.to(dtype).contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def load_draft_model(path: Path, dtype: torch.dtype, attn_implementation: str) -> DraftModel:
    """Load a local z-lab DFlash checkpoint (safetensors only).

    Raises:
        ConfigError: files are missing, or tensors do not match the config.
    """
    config_path = path / "config.json"
    if not config_path.is_file():
        raise ConfigError(f"no draft checkpoint at {path}: config.json is missing")
    try:
        values = json.loads(config_path.read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{config_path} is not JSON: {error}") from error
    if values.get("architectures") != [ARCHITECTURE]:
        raise ConfigError(
            f"{config_path}: architectures is {values.get('architectures')}, expected ['{ARCHITECTURE}']"
        )
    config = Qwen3Config.from_dict(values)
    config._attn_implementation = attn_implementation
    model = DraftModel(config)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"no *.safetensors in {path}")
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors.update(load_file(file))
    tensors = {name.removeprefix("model."): value for name, value in tensors.items()}
    try:
        missing, unexpected = model.load_state_dict(tensors, strict=False)
    except RuntimeError as error:  # a shape differs
        raise ConfigError(f"{path}: tensors do not match config.json: {error}") from error
    if missing or unexpected:
        raise ConfigError(f"{path}: missing tensors {missing}, unexpected tensors {unexpected}")
    return model.to(dtype).eval()
