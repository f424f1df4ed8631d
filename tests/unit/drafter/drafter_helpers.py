"""Random draft models in z-lab's layout, and engines around them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config

from dflash_ops.attention import GATHERED
from dflash_ops.context_attention import ContextAttention
from dflash_ops.paging import PagedPool, PoolLayout
from dflash_ops.sampling import choose_tokens
from dflash_wire.records import Ingest, Row, StepPlan
from dflash_wire.sampling import SamplingParams
from drafter.borrowed import BorrowedWeights
from drafter.checkpoint import load_draft_model, save_draft_model
from drafter.engine import DrafterEngine
from drafter.model import DraftModel

HIDDEN = 32
HEAD_DIM = 8
VOCAB = 64
MASK_ID = 63
NUM_TARGET_LAYERS = 12
PAGE_SIZE = 4
CPU = torch.device("cpu")


def draft_config(
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    vocab_size: int = VOCAB,
    dflash_config: dict[str, Any] | None = None,
    **values: Any,
) -> Qwen3Config:
    """A valid config; ``dflash_config`` adds to the nested keys, ``values`` to the top level."""
    return Qwen3Config(
        **{
            "hidden_size": HIDDEN,
            "intermediate_size": 40,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": HEAD_DIM,
            "vocab_size": vocab_size,
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "num_target_layers": NUM_TARGET_LAYERS,
            "dflash_config": {"mask_token_id": vocab_size - 1, **(dflash_config or {})},
            "attn_implementation": "sdpa",
            **values,
        }
    )


def save_random_draft(
    path: Path, config: Qwen3Config, seed: int = 0, dtype: torch.dtype = torch.float32
) -> DraftModel:
    """Random weights, norms included, saved by ``save_draft_model``; values that ``dtype`` has."""
    torch.manual_seed(seed)
    model = DraftModel(config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:
                value.normal_(1.0, 0.2)
            elif "codebook" in name:
                value.normal_(0.0, 1.0)  # so that a selector changes choices
            else:
                value.normal_(0.0, 0.2)
            value.copy_(value.to(dtype))
    save_draft_model(model, path, torch.float32)
    return model


def random_weights(vocab_size: int = VOCAB, seed: int = 5) -> BorrowedWeights:
    """An embedding table and a head of their own."""
    generator = torch.Generator().manual_seed(seed)
    embedding, head = torch.randn(2, vocab_size, HIDDEN, generator=generator) * 0.5
    return BorrowedWeights(embedding, head)


def make_engine(
    path: Path,
    borrowed: BorrowedWeights | None = None,
    num_rows: int = 64,
    num_pages: int = 32,
    num_lanes: int = 1,
    num_taps: int | None = None,
    index: int = 0,
    taps: list[int] | None = None,
    form: ContextAttention | None = None,
) -> DrafterEngine:
    """An engine whose pools start full of noise, so that a wrong read shows."""
    model = load_draft_model(path, torch.float32, GATHERED)
    config = model.config
    sizes = num_lanes * num_pages, PAGE_SIZE, config.num_key_value_heads, config.head_dim
    shape = config.num_hidden_layers, *sizes, torch.float32, CPU
    pool = PagedPool(*shape)
    generator = torch.Generator().manual_seed(11)
    pool.data.normal_(std=5.0, generator=generator)
    if form is not None:  # the same noise, lying by page
        by_head, pool = pool, PagedPool(*shape, PoolLayout.BY_PAGE)
        pool.data.copy_(by_head.data)
    width = (num_taps or len(model.target_layer_ids)) * HIDDEN
    features = [torch.randn(num_rows, width, generator=generator) for _ in range(num_lanes)]
    borrowed = borrowed or random_weights(config.vocab_size)
    return DrafterEngine(model, borrowed, pool, features, index, taps, form)


def page_tables(num_sequences: int, num_pages: int = 32, seed: int = 3) -> list[list[int]]:
    """Disjoint shuffled page tables that share all pages."""
    pages = list(range(num_pages))
    random.Random(seed).shuffle(pages)
    each = num_pages // num_sequences
    return [pages[i * each : (i + 1) * each] for i in range(num_sequences)]


def verify_row(
    anchor: int, position: int, pages: list[int], width: int, sampling: SamplingParams | None = None
) -> Row:
    return Row(0, [anchor], position, pages, width, sampling=sampling or SamplingParams())


def run_with_logits(
    engine: DrafterEngine, plan: StepPlan, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[list[int]], Tensor]:
    """Run a plan and also return the draft logits ``[n, V]`` that tokens were chosen from."""
    seen: list[Tensor] = []

    def spy(logits: Tensor, runs: Any) -> Tensor:
        seen.append(logits.clone())
        return choose_tokens(logits, runs)

    monkeypatch.setattr("drafter.engine.choose_tokens", spy)
    drafts = engine.run(plan).draft_token_ids
    (logits,) = seen
    return drafts, logits


def ingest_plan(
    step_id: int, count: int, position: int, pages: list[int], offset: int = 0
) -> StepPlan:
    """A plan that only takes features in."""
    return StepPlan(step_id, [], [Ingest(offset, count, position, pages)])
