"""Rows of a pass arranged so that their own tokens are attended with few, regular operators.

Shape letters: R rows of a group, W their width, C a row's context length, Q queries of one key/value head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from dflash_ops.paging import ContextReader, PagedPool
from dflash_ops.visibility import AttentionRow, Reach, Visible, context_part, own_mask

WIDEST_FILLED = 32
"""Rows up to so many tokens may share a group with wider ones; chunks of prompts do not."""
MOST_FILLING = 64
"""Tokens that may be filled in however few there are."""


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Rows of one width, or filled up to one, which share the operators of their block part."""

    num_rows: int
    width: int
    contexts: list[ContextReader | None]
    """One per row, None without context; of a group that is apart from it, none at all."""
    context_masks: list[Tensor | None]
    """One per row, additive ``[Q, C]``; None: every query sees all of it."""
    mask: Tensor | None
    """Additive, ``[Q, W]`` for all rows or ``[R, 1, Q, W]``; None when every token sees every other."""
    place: slice | Tensor
    """Packed tokens ``[R * W]`` of the rows; rows that are filled up repeat their last one."""
    kept: Tensor | None
    """Which of ``[R * W]`` are no filling; None: all."""
    kept_place: slice | Tensor
    """Where those are in the packed order."""
    is_apart: bool = False
    """Whether the step attends the context of all rows together, and this group has none."""


def group_rows(
    rows: Sequence[AttentionRow], heads_per_kv: int, pool: PagedPool, reach: Reach, is_apart: bool
) -> list[AttentionGroup]:
    """Arrange the rows of a pass for one kind of layer.

    Args:
        rows: at least one, in packed order.
        heads_per_kv: query heads that share a key/value head.
        pool: where the context is; queries have its type.
        reach: of the layers.
        is_apart: whether the context of all rows is attended elsewhere.
    """
    if reach.visible is not None:
        rows = [replace(row, visible=reach.visible) for row in rows]
    return [
        _group(members, heads_per_kv, pool, reach.window, is_apart)
        for members in _members_by_group(rows)
    ]


def _members_by_group(rows: Sequence[AttentionRow]) -> list[list[AttentionRow]]:
    """Narrow rows that see no later token of their own together, whatever their widths; others by width.

    A group costs a dozen operators per layer however small it is, filling next to nothing as long as there
    is little of it. Where there would be much, rows share a group up to the next power of two.
    """
    narrow = [row for row in rows if row.width <= WIDEST_FILLED and row.visible is not Visible.ALL]
    widths = [row.width for row in narrow]
    is_even = len(widths) * max(widths, default=0) <= 2 * sum(widths) + MOST_FILLING
    groups: dict[int, list[AttentionRow]] = {}
    for row in rows:
        if row.width > WIDEST_FILLED or row.visible is Visible.ALL:
            key = -row.width
        else:
            key = 0 if is_even else (row.width - 1).bit_length()
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _group(
    rows: list[AttentionRow],
    heads_per_kv: int,
    pool: PagedPool,
    window: int | None,
    is_apart: bool,
) -> AttentionGroup:
    width = max(row.width for row in rows)
    kept = None
    place = kept_place = _place(rows, pool.device)
    if any(row.width < width for row in rows):
        inside = [n * width + i for n, row in enumerate(rows) for i in range(row.width)]
        kept = torch.tensor(inside, device=pool.device)
        places = [row.offset + min(i, row.width - 1) for row in rows for i in range(width)]
        place = torch.tensor(places, device=pool.device)
    contexts: list[tuple[ContextReader | None, Tensor | None]] = []
    if not is_apart:
        contexts = [context_part(row, width, heads_per_kv, window, pool) for row in rows]
    return AttentionGroup(
        num_rows=len(rows),
        width=width,
        contexts=[reader for reader, _ in contexts],
        context_masks=[mask for _, mask in contexts],
        mask=own_mask(rows, width, heads_per_kv, window, pool.dtype, pool.device),
        place=place,
        kept=kept,
        kept_place=kept_place,
        is_apart=is_apart,
    )


def _place(rows: list[AttentionRow], device: torch.device) -> slice | Tensor:
    """Where the rows' tokens are in the packed order."""
    if all(a.offset + a.width == b.offset for a, b in pairwise(rows)):
        return slice(rows[0].offset, rows[-1].offset + rows[-1].width)
    places = [row.offset + i for row in rows for i in range(row.width)]
    return torch.tensor(places, device=device)
