"""Random pools and rows, and a dense softmax over them, query by query."""

from __future__ import annotations

import random

import torch
from attention_rows import tree
from torch import Tensor

from dflash_ops.attention import AttentionRow, Visible
from dflash_ops.paging import PagedPool, PoolLayout

HEAD_DIM = 8
NUM_KV_HEADS = 2
SCALE = 0.3
NUM_PAGES = 16
PAGE_SIZE = 4
LAYER = 1


def make_pool(layout: PoolLayout = PoolLayout.BY_HEAD) -> PagedPool:
    pool = PagedPool(
        2, NUM_PAGES, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, torch.float32, torch.device("cpu"), layout
    )
    pool.data.copy_(torch.randn(pool.data.shape))  # the same in every layout
    return pool


def make_row(
    offset: int, width: int, context: int, visible: Visible | Tensor, is_run: bool = False
) -> AttentionRow:
    """A row whose context is on pages anywhere, or on pages that follow each other."""
    count = -(-context // PAGE_SIZE)
    first = int(torch.randint(NUM_PAGES - count + 1, ()))
    page_ids = torch.randperm(NUM_PAGES)[:count].tolist()
    return AttentionRow(
        offset, width, list(range(first, first + count)) if is_run else page_ids, context, visible
    )


def dense_row(row: AttentionRow, query: Tensor, key: Tensor, value: Tensor, pool: Tensor) -> Tensor:
    """``query [T, H, D]``, ``key``/``value [T, G, D]``, ``pool [slots, 2, G, D]`` -> ``[W, H, D]``."""
    num_heads = query.shape[1]
    slots = [row.page_ids[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for i in range(row.context)]
    outputs = torch.zeros(row.width, num_heads, HEAD_DIM)
    for i in range(row.width):
        if isinstance(row.visible, Tensor):
            seen = [j for j in range(row.width) if row.visible[i, j]]
        else:
            seen = list(range(row.width if row.visible is Visible.ALL else i + 1))
        own = [row.offset + j for j in seen]
        for head in range(num_heads):
            group = head * NUM_KV_HEADS // num_heads
            keys = torch.cat([pool[slots, 0, group], key[own, group]])
            values = torch.cat([pool[slots, 1, group], value[own, group]])
            weights = (keys @ query[row.offset + i, head] * SCALE).softmax(dim=0)
            outputs[i, head] = weights @ values
    return outputs


def random_rows(seed: int) -> list[AttentionRow]:
    """Prefill rows, chains and trees of any widths, with and without context, mixed."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rows: list[AttentionRow] = []
    offset = 0
    for _ in range(rng.randint(2, 7)):
        width, context = rng.randint(1, 4), rng.choice([0, 0, 1, 5, 17])
        visible = rng.choice([Visible.ALL, Visible.CAUSAL, tree(width, rng)[0]])
        rows.append(make_row(offset, width, context, visible, rng.random() < 0.5))
        offset += width
    return rows


def forget_the_rest(pool: PagedPool, rows: list[AttentionRow]) -> None:
    """What lies behind a row's own positions must never be read."""
    used = {s for r in rows for s in pool.slots(r.page_ids, 0, r.context).tolist()}
    pool.data[:, [slot for slot in range(pool.num_slots) if slot not in used]] = torch.nan
