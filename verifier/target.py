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
from verifier.rank_group import RankGroup
from verifier.shard import load_shard


def load_whole(path: str, config: Any, dtype: torch.dtype) -> Any:
    """Load all of a target onto the CPU as transformers' own model.

    Raises:
        ConfigError: it cannot be loaded.
    """
    try:
        return AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=GATHERED,
            use_safetensors=True,
            trust_remote_code=False,
        )
    except OSError as error:
        raise ConfigError(f"cannot load the target model at {path!r}: {error}") from error


class TargetModel:
    """A frozen causal LM over packed rows.

    Args:
        path: local folder or hub id; safetensors only, no remote code.
        dtype: compute and weight type.
        device: where to run.
        group: the ranks that share the target, of which this process holds one; None: it holds all of it.

    Raises:
        ConfigError: the model cannot be loaded or is of an unsupported family.
    """

    def __init__(
        self,
        path: str,
        dtype: torch.dtype,
        device: torch.device,
        group: RankGroup | None = None,
    ) -> None:
        config = load_target_config(path)
        model = (
            load_whole(path, config, dtype)
            if group is None
            else load_shard(path, config, dtype, group)
        )
        self._take(model.to(device).eval(), config, group)

    @classmethod
    def of(cls, model: Any) -> TargetModel:
        """The target that a transformers model is, wherever its weights come from.

        Args:
            model: whole, of a supported family, on its device, its attention set to ``GATHERED``; its layers
                give their weights up.
        """
        target = cls.__new__(cls)
        target._take(model.eval(), model.config, None)
        return target

    def _take(self, model: Any, config: Any, group: RankGroup | None) -> None:
        """Put packed layers around a model, or around a rank's share of one."""
        self.model: Any = model
        self.config = config
        base = self.model.model
        self.layers = packed_layers(base.layers, None if group is None else group.summed)
        kinds: list[str | None] = [None] * len(base.layers)
        if rotates_by_kind(self.config):
            kinds = list(layer_kinds(self.config))
        like = base.norm.weight
        self._rotary = {kind: RotaryTables(base.rotary_emb, like, kind) for kind in set(kinds)}
        self._kinds = kinds
        self._norm = norm_of(base.norm)
        self.head = product_of(self.model.lm_head.weight.detach())
        self.device: torch.device = like.device
        self.dtype: torch.dtype = like.dtype
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.reaches = layer_reaches(config)
        has_sinks = any(hasattr(layer.self_attn, "sinks") for layer in base.layers)
        self.has_plain_attention = self.reaches is None and not has_sinks
        """Whether in all layers a query sees what rows say, and nothing besides."""
        self.num_layers: int = config.num_hidden_layers
        num_ranks = 1 if group is None else group.num_ranks
        self.num_heads: int = config.num_attention_heads // num_ranks
        """Of this process, as ``num_kv_heads``."""
        self.num_kv_heads: int = config.num_key_value_heads // num_ranks
        self.head_dim: int = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.max_positions: int = config.max_position_embeddings

    def forward(
        self,
        token_ids: Tensor,
        positions: list[int] | Tensor,
        step: StepAttention,
        target_layer_ids: list[int],
    ) -> tuple[Tensor, Tensor]:
        """Run the layers once over all packed tokens.

        Args:
            token_ids: ``[T]`` int64.
            positions: T absolute positions; on the device only those that are reserved.
            step: attention metadata; collects every layer's keys and values.
            target_layer_ids: 0-based layers whose *outputs* are captured, in this order; on a rank that
                captures nothing, none.

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
        captured = [tapped[i] for i in target_layer_ids]
        features = torch.cat(captured, dim=-1) if captured else hidden[:, :0]
        return self._norm(hidden), features

    def reserve_positions(self, num_positions: int) -> None:
        """Have rotations of so many positions ready, so that passes may find them on the device. Mutates."""
        for tables in self._rotary.values():
            tables.reserve(num_positions)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[n, H]`` after the final norm -> ``[n, V]``."""
        logits = self.head(hidden)
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits
