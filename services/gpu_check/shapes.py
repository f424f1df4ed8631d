"""Which pair is built, and over which sizes it is run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import Qwen3Config

QWEN3_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False,
}
DRAFT_B16: dict[str, Any] = QWEN3_8B | {
    "num_hidden_layers": 5,
    "num_target_layers": 36,
    "block_size": 16,
    "dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 151669},
}
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "tie_word_embeddings": False,
}
TINY_DRAFT: dict[str, Any] = TINY | {
    "num_hidden_layers": 2,
    "num_target_layers": 3,
    "block_size": 4,
    "dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 127},
}


@dataclass(frozen=True, slots=True)
class Shape:
    """One pair and the sizes that are measured.

    Attributes:
        name: of the pair.
        target: of its config.
        drafter: of its config, in the z-lab layout.
        dtype: of weights and pools.
        page_size: tokens per page.
        widths: of draft blocks and verify rows, anchor included; ascending.
        rows: sequences in a pass; ascending.
        contexts: committed positions of each; ascending.
        copy_bytes: how much is copied to measure the card's bandwidth.
        matmul_size: side of the square matrices that its arithmetic is measured with.
        reference_tokens: that other loops generate.
    """

    name: str
    target: dict[str, Any]
    drafter: dict[str, Any]
    dtype: str
    page_size: int
    widths: tuple[int, ...]
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    copy_bytes: int
    matmul_size: int
    reference_tokens: int

    def target_config(self) -> Qwen3Config:
        """The target's."""
        return Qwen3Config(**self.target)

    def draft_config(self) -> Qwen3Config:
        """The drafter's."""
        return Qwen3Config(**self.drafter)

    @property
    def taps(self) -> list[int]:
        """Target layers that the drafter reads."""
        return list(self.drafter["dflash_config"]["target_layer_ids"])

    @property
    def draft_block_size(self) -> int:
        """The longest block, anchor included."""
        return int(self.drafter["block_size"])

    def pages_of(self, context: int) -> int:
        """Pages of a row with the widest block behind its context."""
        return -(-(context + self.widths[-1]) // self.page_size)


FULL = Shape(
    "Qwen3-8B with DFlash-b16, random weights",
    QWEN3_8B,
    DRAFT_B16,
    "bfloat16",
    16,
    (1, 2, 4, 8, 16),
    (1, 4, 8, 16, 32),
    (1024, 8192),
    4 * 2**30,
    8192,
    64,
)
DRY = Shape(
    "a tiny pair, random weights",
    TINY,
    TINY_DRAFT,
    "float32",
    4,
    (1, 2, 4),
    (1, 2),
    (8, 24),
    2**20,
    64,
    6,
)
