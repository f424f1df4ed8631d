"""Attention token by token: the numbers of grouped attention, and the same bits however tokens are packed."""

from __future__ import annotations

import random

import pytest
import torch
from attention_rows import tree
from torch import Tensor

from dflash_ops.attention import StepAttention, attend_packed, plan_attention
from dflash_ops.paging import PagedPool
from dflash_ops.tokenwise import plan_tokenwise
from dflash_ops.visibility import AttentionRow, Reach, Visible

pytestmark = pytest.mark.unit

HEAD_DIM, NUM_KV_HEADS, HEADS_PER_KV = 16, 2, 3
NUM_HEADS = NUM_KV_HEADS * HEADS_PER_KV
PAGE_SIZE, NUM_PAGES = 4, 40
SCALE = 0.25
REACHES = [Reach(), Reach(window=5)]


def make_pool() -> PagedPool:
    device = torch.device("cpu")
    pool = PagedPool(2, NUM_PAGES, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, torch.float32, device)
    pool.data.normal_()
    return pool


def random_rows(chance: random.Random) -> list[AttentionRow]:
    rows: list[AttentionRow] = []
    pages = chance.sample(range(NUM_PAGES), NUM_PAGES)
    offset = 0
    for _ in range(chance.randint(1, 4)):
        width, context = chance.randint(1, 9), chance.choice([0, 1, 7, 20])
        mine = [pages.pop() for _ in range(-(-context // PAGE_SIZE))]
        visible, depths = (Visible.CAUSAL, None) if chance.random() < 0.5 else tree(width, chance)
        rows.append(AttentionRow(offset, width, mine, context, visible, depths))
        offset += width
    return rows


@pytest.mark.parametrize("seed", range(12))
def test_it_is_grouped_attention(seed: int) -> None:
    torch.manual_seed(seed)
    rows, pool = random_rows(random.Random(seed)), make_pool()
    total = sum(row.width for row in rows)
    query = torch.randn(total, NUM_HEADS, HEAD_DIM)
    step_kv = torch.randn(total, 2, NUM_KV_HEADS, HEAD_DIM)
    for layer in range(2):
        grouped = plan_attention(rows, HEADS_PER_KV, pool, REACHES)
        single = StepAttention([], tokenwise=plan_tokenwise(rows, pool, REACHES))
        expected = attend_packed(query, step_kv, grouped, layer, SCALE)
        found = attend_packed(query, step_kv, single, layer, SCALE)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert len(single.step_kv) == 1


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("as_tree", [False, True])
def test_where_the_row_begins_changes_no_bit(layer: int, as_tree: bool) -> None:
    """One sequence of 23 tokens whose last 1, 2, ... are the row and the others its context."""
    torch.manual_seed(3)
    pool, count = make_pool(), 23
    pages = list(range(NUM_PAGES))[::-1]
    query = torch.randn(count, NUM_HEADS, HEAD_DIM)
    kv = torch.randn(count, 2, NUM_KV_HEADS, HEAD_DIM)
    pool.write(pool.slots(pages, 0, count), kv[None].expand(2, -1, -1, -1, -1))
    outputs = []
    for width in range(1, count + 1):
        start = count - width
        visible: Visible | Tensor = Visible.CAUSAL
        if as_tree:
            visible = torch.ones(width, width, dtype=torch.bool).tril()
        other = AttentionRow(width, 3, pages[10:], 9, Visible.CAUSAL)
        rows = [AttentionRow(0, width, pages, start, visible, list(range(width))), other]
        step = StepAttention([], tokenwise=plan_tokenwise(rows, pool, REACHES))
        beside = torch.randn(3, NUM_HEADS, HEAD_DIM)
        packed = torch.cat([query[start:], beside])
        step_kv = torch.cat([kv[start:], torch.randn(3, 2, NUM_KV_HEADS, HEAD_DIM)])
        outputs.append(attend_packed(packed, step_kv, step, layer, SCALE)[width - 1])
    assert all(torch.equal(output, outputs[0]) for output in outputs)
