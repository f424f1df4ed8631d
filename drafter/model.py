"""The DFlash draft model: its layers, and the features that reach them.

A draft layer *is* a transformers decoder layer: what makes it DFlash is where its attention finds
the context. Context keys and values come from target features through the layer's own ``k_proj``,
``k_norm`` and ``v_proj`` (never through its norms, ``o_proj`` or MLP); how they reach the attention
function is the caller's business (a paged pool when serving, a dense tensor when training), through
keyword arguments that the layers pass on.

Source: arXiv 2602.06036 section 4; tensor names as published by z-lab (``drafter.checkpoint`` reads and
writes them).

Shape letters: T tokens, H hidden, K tapped target layers, L draft layers, G key/value heads, D head size,
V target vocabulary, v draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from dflash_wire.errors import ConfigError
from drafter.convolution import ConvolvedDecoderLayer
from drafter.selector import CandidateSelector
from drafter.settings import default_target_layer_ids, draft_setting, read_settings

__all__ = ["DraftModel", "default_target_layer_ids", "draft_setting"]


class DraftModel(nn.Module):
    """Draft layers, feature projection and norms; embedding and head are the target's unless it has its own.

    ``config._attn_implementation`` names a function in transformers' attention registry; it receives
    the keyword arguments given to ``forward``.

    Raises:
        ConfigError: the config has a key whose meaning this version does not implement.
    """

    d2t: Tensor | None
    """``[v]`` int64: what to add to a draft token's number to get the target's id."""
    mask_embedding: Tensor | None
    """``[H]``, instead of the mask token's row of the embedding table."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        settings = read_settings(config)
        self.config = config
        self.settings = settings
        self.target_layer_ids = settings.target_layer_ids
        self.draft_block_size = settings.draft_block_size
        self.mask_token_id = settings.mask_token_id
        self.embedding_scale = settings.embedding_scale
        hidden = config.hidden_size
        self.layers = nn.ModuleList([self._layer(i) for i in range(config.num_hidden_layers)])
        self.fc = nn.Linear(len(self.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = Qwen3RMSNorm(hidden, eps=config.rms_norm_eps)
        self.norm = Qwen3RMSNorm(hidden, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.candidate_selector: CandidateSelector | None = None
        if settings.selector is not None:
            self.candidate_selector = CandidateSelector(
                config.vocab_size, hidden, settings.selector
            )
        draft_vocab_size = settings.draft_vocab_size
        self.lm_head: nn.Linear | None = None
        if settings.has_own_head:
            self.lm_head = nn.Linear(hidden, draft_vocab_size or config.vocab_size, bias=False)
        self.embed_tokens: nn.Embedding | None = None
        if settings.has_own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        offsets = None
        if draft_vocab_size is not None:
            offsets = torch.zeros(draft_vocab_size, dtype=torch.int64)
        self.register_buffer("d2t", offsets)
        self.register_buffer("mask_embedding", None, persistent=False)

    def _layer(self, index: int) -> Qwen3DecoderLayer:
        convolution = self.settings.convolution
        if convolution is None:
            return Qwen3DecoderLayer(self.config, index)
        return ConvolvedDecoderLayer(self.config, index, convolution)

    def draft_token_ids(self) -> Tensor | None:
        """The target's ids of the draft vocabulary ``[v]``, ascending; None when it is the target's own."""
        if self.d2t is None:
            return None
        return self.d2t + torch.arange(self.d2t.shape[0], device=self.d2t.device)

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
        """Run the draft layers over block tokens, as training does.

        Args:
            embeddings: ``[1, T, H]`` target embeddings of anchors and mask tokens (unscaled).
            positions: ``[1, T]`` int64, absolute.
            attention: passed to the attention function of every layer.

        Returns:
            ``[1, T, H]`` after the final norm. Row k of a block predicts the token *at* its own
            position; the anchor's row predicts nothing.

        Raises:
            ConfigError: this drafter has parts that only serving implements.
        """
        self.check_trainable()
        hidden = embeddings * self.embedding_scale
        position_embeddings = self.rotary_emb(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=position_embeddings, **attention)
        normed: Tensor = self.norm(hidden)
        return normed

    def check_trainable(self) -> None:
        """Refuse drafters that training would take for plain ones.

        Raises:
            ConfigError: names what is in the way.
        """
        settings = self.settings
        for is_there, what in (
            (not settings.is_plain, "causal or sliding layers, or convolutions"),
            (settings.selector is not None, "a candidate selector"),
            (
                settings.output_multiplier != 1.0 or settings.logit_softcap,
                "scaled or capped logits",
            ),
            (settings.has_own_head or settings.has_own_embedding, "a head or embedding of its own"),
            (self.mask_embedding is not None, "a mask embedding"),
        ):
            if is_there:
                raise ConfigError(f"drafters with {what} can be served, but not trained yet")
