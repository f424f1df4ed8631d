"""The target model: loading, and one packed forward pass with feature capture.

Layers are transformers' own; this module only replaces what surrounds them (mask building, cache
objects, output lists), because our rows are packed and our keys and values are paged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dflash_ops.attention import GATHERED, StepAttention
from dflash_ops.family_layers import packed_layers
from dflash_ops.norms import norm_of
from dflash_ops.products import product_of
from dflash_ops.rotary import RotaryTables
from dflash_wire.errors import ConfigError
from verifier.families import layer_kinds, layer_reaches, load_target_config, rotates_by_kind


class TargetModel:
    """A frozen causal LM over packed rows.

    Args:
        path: local folder or hub id; safetensors only, no remote code.
        dtype: compute and weight type.
        device: where to run.

    Raises:
        ConfigError: the model cannot be loaded or is of an unsupported family.
    """

    def __init__(self, path: str, dtype: torch.dtype, device: torch.device) -> None:
        self.config = load_target_config(path)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                path,
                config=self.config,
                dtype=dtype,
                attn_implementation=GATHERED,
                use_safetensors=True,
                trust_remote_code=False,
            )
        except OSError as error:
            raise ConfigError(f"cannot load the target model at {path!r}: {error}") from error
        self.model: Any = model.to(device).eval()  # type: ignore[arg-type]
        base = self.model.model
        self.layers = packed_layers(base.layers)
        kinds: list[str | None] = [None] * len(base.layers)
        if rotates_by_kind(self.config):
            kinds = list(layer_kinds(self.config))
        like = base.norm.weight
        self._rotary = {kind: RotaryTables(base.rotary_emb, like, kind) for kind in set(kinds)}
        self._kinds = kinds
        self._norm = norm_of(base.norm)
        self.head = product_of(self.model.lm_head.weight.detach())
        self.device = device
        self.dtype = dtype
        config = self.config
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.reaches = layer_reaches(config)
        self.num_layers: int = config.num_hidden_layers
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.max_positions: int = config.max_position_embeddings

    def forward(
        self,
        token_ids: Tensor,
        positions: list[int],
        step: StepAttention,
        target_layer_ids: list[int],
    ) -> tuple[Tensor, Tensor]:
        """Run the layers once over all packed tokens.

        Args:
            token_ids: ``[T]`` int64.
            positions: T absolute positions.
            step: attention metadata; collects every layer's keys and values.
            target_layer_ids: 0-based layers whose *outputs* are captured, in this order.

        Returns:
            hidden states after the final norm ``[T, H]`` and target features ``[T, K*H]``.
        """
        base = self.model.model
        hidden = base.embed_tokens(token_ids)
        rotations = {kind: tables.at(positions) for kind, tables in self._rotary.items()}
        wanted = set(target_layer_ids)
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, rotations[self._kinds[index]], step)
            if index in wanted:
                tapped[index] = hidden
        features = torch.cat([tapped[i] for i in target_layer_ids], dim=-1)
        return self._norm(hidden), features

    def logits(self, hidden: Tensor) -> Tensor:
        """``[n, H]`` after the final norm -> ``[n, V]``."""
        logits = self.head(hidden)
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits
