"""Gathered attention against a dense softmax, row by row, query by query."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from attention_helpers import (
    HEAD_DIM,
    LAYER,
    NUM_KV_HEADS,
    SCALE,
    dense_row,
    forget_the_rest,
    make_pool,
    make_row,
    random_rows,
)
from attention_rows import tree

from dflash_ops.attention import (
    AttentionRow,
    StepAttention,
    Visible,
    _attend,
    _attend_in_parts,
    gathered_attention,
    plan_attention,
)

pytestmark = pytest.mark.unit


def check(rows: list[AttentionRow], heads_per_kv: int) -> StepAttention:
    pool = make_pool()
    forget_the_rest(pool, rows)
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
    check(random_rows(seed), heads_per_kv)


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
    rows = [make_row(4 * i, 4, c, tree(4, rng)[0]) for i, c in enumerate(contexts)]
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
        replace(row, visible=tree(row.width, rng)[0]) if row.width > 1 else row for row in rows
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
