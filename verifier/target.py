"""The target model: loading, and one packed forward pass with feature capture.

Layers are transformers' own; this module only replaces what surrounds them (mask building, cache
objects, output lists), because our rows are packed and our keys and values are paged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from dflash_ops.attention import GATHERED, StepAttention
from dflash_ops.fused_layer import packed_layers
from dflash_ops.norms import RootMeanSquareNorm
from dflash_ops.products import product_of
from dflash_ops.rotary import RotaryTables
from dflash_wire.errors import ConfigError

SUPPORTED_MODEL_TYPES = ("qwen3", "llama")
# Their frequencies depend on the longest position of a pass, so on who shares the batch.
UNSUPPORTED_ROPE_TYPES = ("dynamic", "longrope")


def load_target_config(path: str) -> Any:
    """Load and check the target's config.

    Raises:
        ConfigError: nothing there, or a family or feature that is not supported.
    """
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=Path(path).exists())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load a target model config from {path!r}: {error}") from error
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise ConfigError(
            f"target family {config.model_type!r} is not supported; supported are "
            f"{', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"}:
        raise ConfigError(f"target layer types {sorted(layer_types)} are not supported yet")
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if rope_type in UNSUPPORTED_ROPE_TYPES:
        raise ConfigError(f"target rope type {rope_type!r} is not supported yet")
    return config


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
        self._layers = packed_layers(base.layers)
        self._rotary = RotaryTables(base.rotary_emb, base.norm.weight)
        self._norm = RootMeanSquareNorm.of(base.norm)
        self._head = product_of(self.model.lm_head.weight.detach())
        self.device = device
        self.dtype = dtype
        config = self.config
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
        rotation = self._rotary.at(positions)
        wanted = set(target_layer_ids)
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            hidden = layer(hidden, rotation, step)
            if index in wanted:
                tapped[index] = hidden
        features = torch.cat([tapped[i] for i in target_layer_ids], dim=-1)
        return self._norm(hidden), features

    def logits(self, hidden: Tensor) -> Tensor:
        """``[n, H]`` after the final norm -> ``[n, V]``."""
        return self._head(hidden)
