"""The EAGLE-3 draft model: three tapped layers of the target become one hidden state, and one decoder layer
turns it and the next token into the hidden state behind that token.

The layer reads *pairs*: a token, and the hidden state of the place before it. At committed places that state
comes from target features; behind them it is the layer's own output, which stands for what the target would
have said.

Tensor names as published (``drafter.checkpoint.eagle3`` reads them). This module holds weights; ``layer``
and ``engine`` run them.

Shape letters: K tapped target layers, H hidden, V target vocabulary, v draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
)

Config = LlamaConfig | Qwen3Config
CONFIGS: dict[str, Any] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
_LAYERS: dict[str, Any] = {"llama": LlamaDecoderLayer, "qwen3": Qwen3DecoderLayer}
_NORMS: dict[str, Any] = {"llama": LlamaRMSNorm, "qwen3": Qwen3RMSNorm}
_ROTARY: dict[str, Any] = {"llama": LlamaRotaryEmbedding, "qwen3": Qwen3RotaryEmbedding}


@dataclass(frozen=True, slots=True)
class Eagle3Settings:
    """A draft model's settings beside those of its decoder layer.

    Attributes:
        target_layer_ids: K tapped layers, 0-based, in the order in which ``fc`` reads them.
        num_target_layers: depth of the target; None where nobody says.
        norm_before_residual: the residual of the attention sublayer is the normalised hidden state.
        norm_before_fc: one norm over all K features together.
        has_feature_norms: one norm for each of them.
        norm_output: the next pair gets the output behind the final norm.
        draft_vocab_size: size of a draft vocabulary; None: the target's.
        has_own_head: whether the checkpoint brings an output head.
        has_own_embedding: whether it brings an embedding table.
    """

    target_layer_ids: list[int]
    num_target_layers: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    has_feature_norms: bool = False
    norm_output: bool = False
    draft_vocab_size: int | None = None
    has_own_head: bool = True
    has_own_embedding: bool = False
    output_multiplier: float = 1.0
    logit_softcap: float | None = None


class Eagle3Model(nn.Module):
    """Weights of one drafter; embedding and head are the target's unless it has its own.

    Args:
        config: of the decoder layer, ``llama`` or ``qwen3``.
        settings: what else decides what it computes.
        draft_block_size: longest chain, anchor included. The model knows no limit of its own.
    """

    d2t: Tensor | None
    """``[v]`` int64: what to add to a draft token's number to get the target's id."""

    def __init__(self, config: Config, settings: Eagle3Settings, draft_block_size: int) -> None:
        super().__init__()
        self.config = config
        self.settings = settings
        self.draft_block_size = draft_block_size
        hidden, kind = config.hidden_size, config.model_type
        norm_class, num_taps = _NORMS[kind], len(settings.target_layer_ids)
        self.layer = _pair_layer(config, norm_class)
        self.fc = nn.Linear(num_taps * hidden, hidden, bias=False)
        self.norm = norm_class(hidden, eps=config.rms_norm_eps)
        self.rotary_emb = _ROTARY[kind](config)
        self.input_norm = None
        if settings.norm_before_fc:
            self.input_norm = norm_class(num_taps * hidden, eps=config.rms_norm_eps)
        self.fc_norm = None
        if settings.has_feature_norms:
            norms = [norm_class(hidden, eps=config.rms_norm_eps) for _ in range(num_taps)]
            self.fc_norm = nn.ModuleList(norms)
        self.lm_head: nn.Linear | None = None
        if settings.has_own_head:
            size = settings.draft_vocab_size or config.vocab_size
            self.lm_head = nn.Linear(hidden, size, bias=False)
        self.embed_tokens: nn.Embedding | None = None
        if settings.has_own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        offsets = None
        if settings.draft_vocab_size is not None:
            offsets = torch.zeros(settings.draft_vocab_size, dtype=torch.int64)
        self.register_buffer("d2t", offsets)

    @property
    def target_layer_ids(self) -> list[int]:
        """K tapped layers."""
        return self.settings.target_layer_ids

    def draft_token_ids(self) -> Tensor | None:
        """The target's ids of the draft vocabulary ``[v]``; None when it is the target's own."""
        if self.d2t is None:
            return None
        return self.d2t + torch.arange(self.d2t.shape[0], device=self.d2t.device)


def _pair_layer(config: Config, norm_class: Any) -> Any:
    """A decoder layer whose queries, keys and values read token and hidden state side by side."""
    layer = _LAYERS[config.model_type](config, 0)
    attention, hidden = layer.self_attn, config.hidden_size
    for name in ("q_proj", "k_proj", "v_proj"):
        plain = getattr(attention, name)
        has_bias = plain.bias is not None
        setattr(attention, name, nn.Linear(2 * hidden, plain.out_features, bias=has_bias))
    layer.hidden_norm = norm_class(hidden, eps=config.rms_norm_eps)
    return layer
