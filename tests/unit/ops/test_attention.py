"""Gathered attention against a dense softmax, row by row, query by query."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from dflash_ops.attention import AttentionRow, StepAttention, build_group, gathered_attention
from dflash_ops.paging import PagedPool

pytestmark = pytest.mark.unit

HEAD_DIM = 8
NUM_KV_HEADS = 2
SCALE = 0.3
NUM_PAGES = 16
PAGE_SIZE = 4
LAYER = 1


def make_pool() -> PagedPool:
    pool = PagedPool(
        2, NUM_PAGES, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, torch.float32, torch.device("cpu")
    )
    pool.data.normal_()
    return pool


def tree_mask(width: int, rng: random.Random) -> Tensor:
    mask = torch.eye(width, dtype=torch.bool)
    for node in range(1, width):
        mask[node] |= mask[rng.randrange(node)]
    return mask


def make_row(offset: int, width: int, context: int, visible: Tensor | None) -> AttentionRow:
    page_ids = torch.randperm(NUM_PAGES)[: -(-context // PAGE_SIZE)].tolist()
    return AttentionRow(offset, width, page_ids, context, visible)


def dense_row(row: AttentionRow, query: Tensor, key: Tensor, value: Tensor, pool: Tensor) -> Tensor:
    """``query [T, H, D]``, ``key``/``value [T, G, D]``, ``pool [slots, 2, G, D]`` -> ``[W, H, D]``."""
    num_heads = query.shape[1]
    slots = [row.page_ids[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for i in range(row.context)]
    outputs = torch.zeros(row.width, num_heads, HEAD_DIM)
    for i in range(row.width):
        seen = [j for j in range(row.width) if row.visible is None or row.visible[i, j]]
        own = [row.offset + j for j in seen]
        for head in range(num_heads):
            group = head * NUM_KV_HEADS // num_heads
            keys = torch.cat([pool[slots, 0, group], key[own, group]])
            values = torch.cat([pool[slots, 1, group], value[own, group]])
            weights = (keys @ query[row.offset + i, head] * SCALE).softmax(dim=0)
            outputs[i, head] = weights @ values
    return outputs


def check(groups: list[list[AttentionRow]], heads_per_kv: int) -> None:
    pool = make_pool()
    rows = [row for group in groups for row in group]
    total = sum(row.width for row in rows)
    query = torch.randn(total, NUM_KV_HEADS * heads_per_kv, HEAD_DIM)
    key, value = torch.randn(2, total, NUM_KV_HEADS, HEAD_DIM)
    built = [build_group(group, heads_per_kv, pool) for group in groups]
    step = StepAttention(pool, built)
    # transformers hands over transposed views, so the test does too.
    packed, weights = gathered_attention(
        SimpleNamespace(layer_idx=LAYER),  # type: ignore[arg-type]
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        None,
        SCALE,
        step=step,
    )
    assert weights is None
    assert packed.shape == (1, *query.shape)
    for row in rows:
        expected = dense_row(row, query, key, value, pool.data[LAYER])
        actual = packed[0, row.offset : row.offset + row.width]
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    (step_kv,) = step.step_kv
    assert torch.equal(step_kv, torch.stack([key, value], dim=1))


@pytest.mark.parametrize("heads_per_kv", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_ragged_rows_in_several_groups(seed: int, heads_per_kv: int) -> None:
    """Prefill rows attend alone, verify rows share a group; both lie mixed in the packed order."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    groups: list[list[AttentionRow]] = []
    verify: list[AttentionRow] = []
    offset = 0
    for _ in range(rng.randint(2, 6)):
        width, context = rng.randint(1, 6), rng.choice([0, 0, 1, 5, 17])
        if rng.random() < 0.4:
            causal = torch.ones(width, width, dtype=torch.bool).tril_()
            groups.append([make_row(offset, width, context, causal)])
        else:
            visible = rng.choice([None, tree_mask(width, rng)])
            verify.append(make_row(offset, width, context, visible))
        offset += width
    check([*groups, verify] if verify else groups, heads_per_kv)


@pytest.mark.parametrize("heads_per_kv", [1, 2, 3])
@pytest.mark.parametrize(
    ("width", "context", "is_masked"), [(1, 0, False), (1, 9, False), (4, 0, True), (5, 9, False)]
)
def test_single_row(width: int, context: int, is_masked: bool, heads_per_kv: int) -> None:
    torch.manual_seed(width + context)
    visible = tree_mask(width, random.Random(0)) if is_masked else None
    check([[make_row(0, width, context, visible)]], heads_per_kv)


@pytest.mark.parametrize("contexts", [(7, 7, 7), (0, 3, 12), (0, 0, 0)])
def test_even_rows_are_not_gathered(contexts: tuple[int, ...]) -> None:
    """Rows of one width side by side take the path without index copies."""
    torch.manual_seed(1)
    rng = random.Random(1)
    rows = [make_row(4 * i, 4, c, tree_mask(4, rng)) for i, c in enumerate(contexts)]
    assert build_group(rows, 2, make_pool()).packed_slice == slice(0, 12)
    check([rows], 2)


def test_equal_unmasked_rows_need_no_mask() -> None:
    torch.manual_seed(2)
    rows = [make_row(3 * i, 3, 5, None) for i in range(2)]
    assert build_group(rows, 1, make_pool()).mask is None
    check([rows], 1)


def test_uneven_rows_side_by_side() -> None:
    torch.manual_seed(3)
    widths, offset, rows = (1, 6, 2, 1), 0, []
    for width in widths:
        rows.append(make_row(offset, width, 4, None))
        offset += width
    assert build_group(rows, 3, make_pool()).packed_slice is None
    check([rows], 3)
