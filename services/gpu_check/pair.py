"""Target and drafter with random weights, made where they run, behind the engines that serve."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dflash_ops.attention import GATHERED
from dflash_ops.context_attention import ContextAttention
from dflash_ops.paging import PagedPool, PoolLayout
from dflash_ops.static_rows import BucketSizes
from dflash_wire.records import Ingest, Row, StepPlan
from dflash_wire.sampling import GREEDY, SamplingParams
from drafter.borrowed import BorrowedWeights
from drafter.engine import DrafterEngine
from drafter.model import DraftModel
from services.gpu_check.shapes import Shape
from verifier.engine import VerifierEngine
from verifier.target import TargetModel

GRAPH_BYTES = 16 * 2**30
SHARE_FOR_POOLS = 0.75
"""Of the memory that is free once the weights are there."""
INGESTED = 8
"""Positions that a row's drafter takes in per step here; more than most steps commit."""


def fill_randomly(model: Any, seed: int) -> None:
    """Give a model weights that keep activations finite. Mutates it."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() == 1:
                value.fill_(1.0)  # norms
            else:
                value.normal_(0.0, 0.02, generator=generator)


def random_target(shape: Shape, device: torch.device) -> Any:
    """transformers' model of the target."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            shape.target_config(),
            dtype=getattr(torch, shape.dtype),
            attn_implementation=GATHERED,
        )
    fill_randomly(model, 0)
    return model


def random_drafter(shape: Shape, device: torch.device) -> DraftModel:
    """The draft model."""
    config = shape.draft_config()
    config._attn_implementation = GATHERED
    with torch.device(device):
        model = DraftModel(config).to(getattr(torch, shape.dtype))
    fill_randomly(model, 1)
    return model.eval()


def bucket_sizes(shape: Shape) -> BucketSizes:
    """Buckets of the sizes that are measured, and no others: nothing is filled up."""
    pages = tuple(shape.pages_of(context) for context in shape.contexts)
    return BucketSizes(shape.rows, shape.widths, pages, shape.rows[-1] * shape.widths[-1])


def noisy_pool(
    shape: Shape, config: dict[str, Any], num_pages: int, device: torch.device
) -> PagedPool:
    """A pool for a model with this config, full of noise."""
    pool = PagedPool(
        config["num_hidden_layers"],
        num_pages,
        shape.page_size,
        config["num_key_value_heads"],
        config["head_dim"],
        getattr(torch, shape.dtype),
        device,
        PoolLayout.BY_PAGE,
    )
    pool.data.normal_()
    return pool


def drafter_engine(
    shape: Shape,
    model: DraftModel,
    borrowed: BorrowedWeights,
    features: Tensor,
    num_pages: int,
    form: ContextAttention,
) -> DrafterEngine:
    """A draft model behind a pool of its own, over static memory."""
    pool = noisy_pool(shape, shape.drafter, num_pages, features.device)
    engine = DrafterEngine(model, borrowed, pool, [features], form=form)
    engine.use_static_passes(bucket_sizes(shape), GRAPH_BYTES)
    return engine


class RandomPair:
    """Both engines over pools that are full of noise.

    Args:
        shape: of both models.
        device: where they are.
        form: of attention over context.
    """

    def __init__(self, shape: Shape, device: torch.device, form: ContextAttention) -> None:
        self.shape = shape
        self.device = device
        self.form = form
        target = TargetModel.of(random_target(shape, device))
        self.borrowed = BorrowedWeights(
            target.model.model.embed_tokens.weight.detach(), target.model.lm_head.weight.detach()
        )
        model = random_drafter(shape, device)
        self.num_pages = self._num_pages()
        self.features = torch.zeros(
            2 * shape.rows[-1] * max(shape.widths[-1], INGESTED),
            len(shape.taps) * target.hidden_size,
            dtype=target.dtype,
            device=device,
        )
        self.features.normal_()
        pool = noisy_pool(shape, shape.target, self.num_pages, device)
        self.verifier = VerifierEngine(target, pool, self.features, shape.taps, form=form)
        self.verifier.use_static_passes(bucket_sizes(shape), GRAPH_BYTES)
        self.drafter = drafter_engine(
            shape, model, self.borrowed, self.features, self.num_pages, form
        )

    def _num_pages(self) -> int:
        """As many as the largest pass wants, or as the card has room for."""
        wanted = self.shape.rows[-1] * self.shape.pages_of(self.shape.contexts[-1])
        if self.device.type != "cuda":
            return wanted
        torch.cuda.empty_cache()  # of what building the layers left
        free, _ = torch.cuda.mem_get_info(self.device)
        of_page = sum(map(self._page_bytes, (self.shape.target, self.shape.drafter)))
        return min(wanted, int(SHARE_FOR_POOLS * free) // of_page)

    def _page_bytes(self, config: dict[str, Any]) -> int:
        item = getattr(torch, self.shape.dtype).itemsize
        per_token = 2 * config["num_key_value_heads"] * config["head_dim"] * item
        return int(per_token * config["num_hidden_layers"] * self.shape.page_size)

    def has_room(self, rows: int, context: int) -> bool:
        """Whether a pass of these sizes fits the pools."""
        return rows * self.shape.pages_of(context) <= self.num_pages

    def tables(self, rows: int, context: int, num_pages: int | None = None) -> list[list[int]]:
        """Page tables of rows that share nothing, their pages in no order; among the first, if so said."""
        each = self.shape.pages_of(context)
        pages = list(range(num_pages or self.num_pages))
        random.Random(0).shuffle(pages)
        return [pages[i * each : (i + 1) * each] for i in range(rows)]

    def plan(
        self,
        rows: int,
        width: int,
        context: int,
        *,
        step_id: int = 0,
        num_ingested: int = 0,
        sampling: SamplingParams = GREEDY,
        num_pages: int | None = None,
    ) -> StepPlan:
        """A step of rows of one width behind one context, each with its last positions to take in."""
        tables = self.tables(rows, context, num_pages)
        planned = [
            Row(i, [5 + i], context, pages, width, sampling=sampling)
            for i, pages in enumerate(tables)
        ]
        ingests = [
            Ingest(i * num_ingested, num_ingested, context - num_ingested, pages)
            for i, pages in enumerate(tables)
            if num_ingested
        ]
        # The verifier writes behind what the drafter reads meanwhile.
        return StepPlan(step_id, planned, ingests, feature_base=self.features.shape[0] // 2)

    def parameter_bytes(self, part: str) -> int:
        """Bytes of weights that a pass reads: ``verify`` or ``draft``; embeddings are looked up, not read."""
        item = self.borrowed.head.element_size()
        config = self.shape.target if part == "verify" else self.shape.drafter
        return int((layer_elements(config) + self.borrowed.head.numel()) * item)


def layer_elements(config: dict[str, Any]) -> int:
    """Elements of all layers' matrices."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    kv_heads = config["num_key_value_heads"] * config["head_dim"]
    attention = hidden * (2 * heads + 2 * kv_heads)
    per_layer = attention + 3 * hidden * config["intermediate_size"]
    return int(per_layer * config["num_hidden_layers"])
