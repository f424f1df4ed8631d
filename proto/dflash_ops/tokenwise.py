"""Attention one token at a time: what a token gets depends on its position and on the keys it sees, alone.

``attention`` takes the tokens of a row together and the context apart from them, so how a sum is split
depends on how many drafts are verified and where a prompt's chunks end; the last digits differ. Here every
token has a product of its own over all keys up to it, in their order, from one piece of memory. That costs a
call per token and layer, and a copy of the context per row and layer.

Shape letters: T packed tokens, W a row's width, C its context, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_ops.paging import ContextReader, PagedPool
from dflash_ops.visibility import AttentionRow, Reach

ALIGNED_DIMS = 16
"""Head sizes must be multiples of it: 64 bytes, so that keys lie alike wherever they begin."""


@dataclass(frozen=True, slots=True)
class TokenwiseRow:
    """One row with what its tokens see."""

    row: AttentionRow
    context: ContextReader | None
    seen: list[Tensor] | None
    """Of every token of a tree: the keys it sees, as places in context and row together. None: a chain's, all
    those up to it."""


@dataclass(frozen=True, slots=True)
class TokenwisePlan:
    """The rows of a pass, and how far each layer reaches back (None: to the beginning)."""

    rows: list[TokenwiseRow]
    windows: list[int | None] | None


def plan_tokenwise(
    rows: Sequence[AttentionRow], pool: PagedPool, reaches: Sequence[Reach] | None
) -> TokenwisePlan:
    """Prepare a pass over ``rows``, none of whose tokens see later ones."""
    planned = []
    for row in rows:
        context = pool.reader(row.page_ids, row.context) if row.context else None
        seen = None
        if isinstance(row.visible, Tensor):
            before = torch.arange(row.context)
            own = [torch.nonzero(mine)[:, 0] + row.context for mine in row.visible]
            seen = [torch.cat([before, mine]) for mine in own]
        planned.append(TokenwiseRow(row, context, seen))
    return TokenwisePlan(planned, None if reaches is None else [one.window for one in reaches])


def attend_tokenwise(
    query: Tensor, step_kv: Tensor, plan: TokenwisePlan, layer_idx: int, scale: float
) -> Tensor:
    """``query [T, H, D]``, ``step_kv [T, 2, G, D]`` -> ``[T, H, D]``; on a CPU."""
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    window = None if plan.windows is None else plan.windows[layer_idx]
    num_kv_heads, head_dim = step_kv.shape[2:]
    for planned in plan.rows:
        row = planned.row
        place = slice(row.offset, row.offset + row.width)
        key, value = _all_keys(planned, step_kv[place], layer_idx)
        queries = query[place].reshape(row.width, num_kv_heads, -1, head_dim)  # [W, G, H / G, D]
        for token in range(row.width):
            mine = _seen(planned, key, value, token, window)
            attended = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
                queries[token : token + 1], *mine, scale=scale
            )[0]
            out[row.offset + token] = attended.reshape(-1, head_dim)
    return out


def _all_keys(planned: TokenwiseRow, own: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
    """Keys and values ``[1, G, C + W, D]`` of context and row, each in one piece."""
    key, value = own.permute(1, 2, 0, 3)[:, None]  # [1, G, W, D] each
    if planned.context is None:
        return key.contiguous(), value.contiguous()
    old_key, old_value = planned.context.layer(layer_idx)
    return torch.cat([old_key, key], dim=2), torch.cat([old_value, value], dim=2)


def _seen(
    planned: TokenwiseRow, key: Tensor, value: Tensor, token: int, window: int | None
) -> tuple[Tensor, Tensor]:
    if planned.seen is not None:
        places = planned.seen[token] if window is None else planned.seen[token][-window:]
        return key.index_select(2, places), value.index_select(2, places)
    end = planned.row.context + token + 1
    start = 0 if window is None else max(0, end - window)
    return key.narrow(2, start, end - start), value.narrow(2, start, end - start)
