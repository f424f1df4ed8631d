"""Gathered attention against a dense softmax, row by row, query by query."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from dflash_ops.attention import (
    AttentionRow,
    StepAttention,
    Visible,
    _attend,
    _attend_in_parts,
    gathered_attention,
    plan_attention,
)
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


def check(rows: list[AttentionRow], heads_per_kv: int) -> StepAttention:
    pool = make_pool()
    # What lies behind a row's own positions must never be read.
    used = {s for r in rows for s in pool.slots(r.page_ids, 0, r.context).tolist()}
    pool.data[:, [slot for slot in range(pool.num_slots) if slot not in used]] = torch.nan
    total = sum(row.width for row in rows)
    query = torch.randn(total, NUM_KV_HEADS * heads_per_kv, HEAD_DIM)
    key, value = torch.randn(2, total, NUM_KV_HEADS, HEAD_DIM)
    step = plan_attention(rows, heads_per_kv, pool)
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
    return step


@pytest.mark.parametrize("heads_per_kv", [1, 2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_ragged_rows(seed: int, heads_per_kv: int) -> None:
    """Prefill rows, chains and trees of any widths, with and without context, mixed."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rows: list[AttentionRow] = []
    offset = 0
    for _ in range(rng.randint(2, 7)):
        width, context = rng.randint(1, 4), rng.choice([0, 0, 1, 5, 17])
        visible = rng.choice([Visible.ALL, Visible.CAUSAL, tree_mask(width, rng)])
        rows.append(make_row(offset, width, context, visible, rng.random() < 0.5))
        offset += width
    check(rows, heads_per_kv)


@pytest.mark.parametrize("heads_per_kv", [1, 2, 3])
@pytest.mark.parametrize("visible", [Visible.ALL, Visible.CAUSAL])
@pytest.mark.parametrize(("width", "context"), [(1, 0), (1, 9), (4, 0), (5, 9), (40, 3)])
@pytest.mark.parametrize("is_run", [True, False])
def test_single_row(
    width: int, context: int, visible: Visible, heads_per_kv: int, is_run: bool
) -> None:
    torch.manual_seed(width + context)
    check([make_row(0, width, context, visible, is_run)], heads_per_kv)


@pytest.mark.parametrize("contexts", [(7, 7, 7), (0, 3, 12), (0, 0, 0)])
def test_even_rows_are_one_group_without_index_copies(contexts: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    rng = random.Random(1)
    rows = [make_row(4 * i, 4, c, tree_mask(4, rng)) for i, c in enumerate(contexts)]
    (group,) = check(rows, 2).groups
    assert group.place == slice(0, 12)


def chains_of(widths: Sequence[int], visible: Visible = Visible.CAUSAL) -> list[AttentionRow]:
    offsets = accumulate(widths, initial=0)
    return [make_row(o, w, 4, visible) for o, w in zip(offsets, widths, strict=False)]


def shapes(rows: list[AttentionRow]) -> list[tuple[int, int]]:
    """(width, rows) of every group, after a check of what they compute."""
    torch.manual_seed(3)
    return [(group.width, group.num_rows) for group in check(rows, 3).groups]


def test_rows_of_one_width_share_a_group_wherever_they_are() -> None:
    rows = chains_of((1, 6, 2, 1, 6), Visible.ALL)
    assert shapes(rows) == [(1, 2), (6, 2), (2, 1)]


def test_chains_and_trees_of_any_width_are_filled_up_to_one_group() -> None:
    assert shapes(chains_of((1, 6, 2, 1, 6))) == [(6, 5)]
    rng = random.Random(5)
    rows = chains_of((3, 1, 5))
    mixed = [
        replace(row, visible=tree_mask(row.width, rng)) if row.width > 1 else row for row in rows
    ]
    assert shapes(mixed) == [(5, 3)]


def test_chunks_of_prompts_have_groups_of_their_own() -> None:
    assert shapes(chains_of((4, 40, 2))) == [(4, 2), (40, 1)]


def test_where_much_would_be_filled_rows_share_up_to_the_next_power_of_two() -> None:
    assert shapes(chains_of((1,) * 12 + (16, 9, 3))) == [(1, 12), (16, 2), (3, 1)]


def test_chains_share_a_mask_and_full_rows_need_none() -> None:
    torch.manual_seed(2)
    chains = [make_row(3 * i, 3, 5, Visible.CAUSAL) for i in range(4)]
    (group,) = check(chains, 2).groups
    assert group.mask is not None and group.mask.shape == (6, 3)
    (group,) = check([make_row(3 * i, 3, 5, Visible.ALL) for i in range(2)], 1).groups
    assert group.mask is None


def test_the_general_form_equals_the_fused_one() -> None:
    """Devices without the fused operator compute the same parts."""
    torch.manual_seed(4)
    query, key, value = torch.randn(2, 3, 6, 8), torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 8)
    mask = torch.zeros(6, 9).masked_fill_(torch.rand(6, 9) < 0.3, float("-inf"))
    fused = _attend(query, key, value, mask, SCALE)
    general = _attend_in_parts(query, key, value, mask, SCALE)
    for ours, theirs in zip(general, fused, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
