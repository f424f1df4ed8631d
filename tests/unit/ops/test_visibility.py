"""Windows, causality by layer and sinks against a dense softmax over positions."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from attention_rows import tree
from torch import Tensor

from dflash_ops.attention import (
    AttentionRow,
    Reach,
    Visible,
    attend_packed,
    gathered_attention,
    plan_attention,
)
from dflash_ops.paging import PagedPool

pytestmark = pytest.mark.unit

HEAD_DIM, NUM_KV_HEADS, NUM_HEADS, PAGE_SIZE, NUM_PAGES = 8, 2, 6, 4, 24
SCALE = 0.3
REACHES = [
    Reach(),
    Reach(window=1),
    Reach(window=3),
    Reach(window=7, visible=Visible.ALL),
    Reach(window=5, visible=Visible.CAUSAL),
    Reach(visible=Visible.ALL),
    Reach(window=200),
]


def random_rows(rng: random.Random) -> list[AttentionRow]:
    pages, rows, offset = list(range(NUM_PAGES)), [], 0
    rng.shuffle(pages)
    for kind, is_run in (("chain", False), ("tree", True), ("tree", False), ("chunk", False)):
        width = 40 if kind == "chunk" else rng.randrange(1, 12)
        context = rng.choice([0, 3, 9, 17])
        mine = [pages.pop() for _ in range(-(-context // PAGE_SIZE))]
        if is_run:
            mine.sort()
        visible: Visible | Tensor = Visible.CAUSAL
        depths = None
        if kind == "tree":
            visible, depths = tree(width, rng)
        rows.append(AttentionRow(offset, width, mine, context, visible, depths))
        offset += width
    return rows


def dense(
    row: AttentionRow,
    reach: Reach,
    query: Tensor,
    step_kv: Tensor,
    layer: Tensor,
    sinks: Tensor | None,
) -> Tensor:
    """``query [T, H, D]``, ``step_kv [T, 2, G, D]``, ``layer [slots, 2, G, D]`` -> ``[W, H, D]``."""
    slots = [row.page_ids[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for i in range(row.context)]
    depths = list(row.depths or range(row.width))
    keys = torch.cat([layer[slots], step_kv[row.offset : row.offset + row.width]])
    places = torch.tensor([*range(row.context), *(row.context + d for d in depths)])
    out = torch.zeros(row.width, NUM_HEADS, HEAD_DIM)
    for i in range(row.width):
        visible = reach.visible or row.visible
        if isinstance(visible, Tensor):
            own = visible[i]
        else:
            own = torch.arange(row.width) <= (row.width if visible is Visible.ALL else i)
        seen = torch.cat([torch.ones(row.context, dtype=torch.bool), own])
        if reach.window is not None:
            seen &= (places - (row.context + depths[i])).abs() < reach.window
        for head in range(NUM_HEADS):
            key, value = keys[seen, :, head * NUM_KV_HEADS // NUM_HEADS].unbind(1)
            scores = key @ query[row.offset + i, head] * SCALE
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1]])
            out[i, head] = scores.softmax(0)[: len(value)] @ value
    return out


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_layers_of_every_reach(seed: int, has_sinks: bool) -> None:
    torch.manual_seed(seed)
    rows = random_rows(random.Random(seed))
    pool = PagedPool(
        len(REACHES),
        NUM_PAGES,
        PAGE_SIZE,
        NUM_KV_HEADS,
        HEAD_DIM,
        torch.float32,
        torch.device("cpu"),
    )
    pool.data.normal_()
    total = sum(row.width for row in rows)
    step = plan_attention(rows, NUM_HEADS // NUM_KV_HEADS, pool, REACHES)
    for layer, reach in enumerate(REACHES):
        query = torch.randn(total, NUM_HEADS, HEAD_DIM)
        step_kv = torch.randn(total, 2, NUM_KV_HEADS, HEAD_DIM)
        sinks = torch.randn(NUM_HEADS) if has_sinks else None
        actual = attend_packed(query, step_kv, step, layer, SCALE, sinks)
        expected = torch.cat(
            [dense(row, reach, query, step_kv, pool.data[layer], sinks) for row in rows]
        )
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
        module = SimpleNamespace(layer_idx=layer)
        heads_first = (query, *step_kv.unbind(1))
        again, _ = gathered_attention(
            module,  # type: ignore[arg-type]
            *(x.transpose(0, 1)[None] for x in heads_first),
            None,
            SCALE,
            step=step,
            s_aux=sinks,
        )
        torch.testing.assert_close(again[0], actual, atol=1e-6, rtol=1e-6)
    assert len(step.step_kv) == 2 * len(REACHES)


def test_a_window_reads_no_more_than_it_shows() -> None:
    """What lies behind a window may be anything, NaN included."""
    pool = PagedPool(1, 8, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, torch.float32, torch.device("cpu"))
    pool.data.normal_()
    window, context = 6, 21
    pages = [5, 0, 7, 2, 3, 6]
    pool.data[:, pool.slots(pages, 0, context - window + 1)] = torch.nan
    row = AttentionRow(0, 3, pages, context, Visible.CAUSAL)
    step = plan_attention([row], 3, pool, [Reach(window=window)])
    query, step_kv = torch.randn(3, NUM_HEADS, HEAD_DIM), torch.randn(3, 2, NUM_KV_HEADS, HEAD_DIM)
    assert attend_packed(query, step_kv, step, 0, SCALE).isfinite().all()
