"""A tiny random target and drafter for the training tests."""

from __future__ import annotations

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from drafter.model import DraftModel
from drafter.training.build import build_draft_model
from drafter.training.data import TrainingRow

VOCAB = 64
MASK_ID = 3
END_ID = 2


def tiny_target(seed: int = 0) -> Qwen3ForCausalLM:
    """A random Qwen3 with 6 layers of 32."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=END_ID,
        pad_token_id=0,
        bos_token_id=None,
    )
    config._attn_implementation = "sdpa"
    return Qwen3ForCausalLM(config).eval().requires_grad_(False)


def tiny_drafter(target: Qwen3ForCausalLM, draft_block_size: int = 4) -> DraftModel:
    """A fresh drafter with 2 layers and 3 taps."""
    return build_draft_model(
        target,
        num_layers=2,
        num_taps=3,
        mask_token_id=MASK_ID,
        draft_block_size=draft_block_size,
        seed=1,
    )


def tiny_rows(num_rows: int = 8, seed: int = 0) -> list[TrainingRow]:
    """Responses that count upwards from a random start behind a random prompt."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(num_rows):
        prompt = torch.randint(4, VOCAB, (5 + index % 3,), generator=generator).tolist()
        start = int(torch.randint(0, 60, (1,), generator=generator))
        response = [4 + (start + i) % 60 for i in range(10 + index % 4)]
        mask = [False] * len(prompt) + [True] * len(response)
        rows.append(TrainingRow(prompt + response, mask))
    return rows
