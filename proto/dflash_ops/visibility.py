"""Which keys a query sees: by its row, and by how far the layer reaches.

A row says which of its own tokens a query sees (all, those before it, or the ancestors of a tree's node); a
layer may narrow that to a window of positions, over the row's own tokens and its context alike. Positions are
counted from the row's first token, its *depth* 0: context is at negative depths.

Shape letters: W width of a group's rows, C context keys that are read, Q queries of one key/value head
(heads that share it, times W).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from dflash_ops.paging import ContextReader, PagedPool


class Visible(Enum):
    """Which tokens of its own row a query sees."""

    ALL = auto()
    CAUSAL = auto()
    """Itself and those before it."""


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """One row: packed tokens ``[offset, offset + width)`` after ``context`` committed ones.

    ``page_ids`` covers the context; ``visible`` may be a ``[width, width]`` bool tensor (query, key), then
    ``depths`` says how far each token is behind the first; without it they follow each other.
    """

    offset: int
    width: int
    page_ids: list[int]
    context: int
    visible: Visible | Tensor
    depths: Sequence[int] | None = None
    num_unread: int = 0
    """Positions at the front of the context that hold nothing and are not seen."""


@dataclass(frozen=True, slots=True)
class Reach:
    """What a layer adds to the rows' own visibility.

    Attributes:
        window: a query sees keys less than so many positions away, itself included, in both directions;
            None: any.
        visible: replaces what rows say; None: as they say.
    """

    window: int | None = None
    visible: Visible | None = None

    @property
    def is_causal(self) -> bool:
        """Whether it never shows a later token, whatever rows say."""
        return self.visible is Visible.CAUSAL


EVERYTHING = Reach()


def own_mask(
    rows: Sequence[AttentionRow],
    width: int,
    heads_per_kv: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor | None:
    """What queries see of their own row.

    Returns:
        additive ``[Q, W]`` for all rows or ``[R, 1, Q, W]``; None when every token sees every other.
    """
    if window is not None and max(_deepest(row) for row in rows) < window:
        window = None
    kinds = {row.visible if isinstance(row.visible, Visible) else None for row in rows}
    if width == 1 or (window is None and kinds == {Visible.ALL}):
        return None
    causal = torch.ones(width, width, dtype=torch.bool, device=device).tril_()
    is_shared = window is None or all(row.depths is None for row in rows)
    if kinds == {Visible.CAUSAL} and is_shared:
        if window is not None:
            causal = causal.triu(1 - window)
        return _additive(causal, dtype, float("-inf")).repeat(heads_per_kv, 1)
    visible = [_visible(row, causal) for row in rows]
    if window is not None:
        visible = [
            mine & _near(_depths(row, width, device), window)
            for row, mine in zip(rows, visible, strict=True)
        ]
    stacked = _additive(torch.stack(visible), dtype, float("-inf"))
    return stacked.repeat(1, heads_per_kv, 1)[:, None]


def context_part(
    row: AttentionRow, width: int, heads_per_kv: int, window: int | None, pool: PagedPool
) -> tuple[ContextReader | None, Tensor | None]:
    """The context that a row's queries read, and what each sees of it.

    Returns:
        None where there is nothing to read; an additive mask ``[Q, C]``, None when all of it is seen. A query
        that sees none of it has a finite, tiny weight everywhere, so that nothing becomes NaN.
    """
    first = row.num_unread
    if window is not None:
        first = max(first, row.context - window + 1)
    if first >= row.context:
        return None, None
    reader = pool.reader(row.page_ids, row.context, first)
    if window is None or row.context + _deepest(row) - first < window:
        return reader, None
    depths = _depths(row, width, pool.device)
    keys = torch.arange(first - row.context, 0, device=pool.device)
    visible = depths[:, None] - keys < window
    mask = _additive(visible, pool.dtype, torch.finfo(pool.dtype).min / 2)
    return reader, mask.repeat(heads_per_kv, 1)


def _deepest(row: AttentionRow) -> int:
    return row.width - 1 if row.depths is None else max(row.depths)


def _depths(row: AttentionRow, width: int, device: torch.device) -> Tensor:
    """``[W]``; what a row is filled up with is where its last token is."""
    depths = list(range(row.width) if row.depths is None else row.depths)
    return torch.tensor(depths + depths[-1:] * (width - row.width), device=device)


def _near(depths: Tensor, window: int) -> Tensor:
    return (depths[:, None] - depths).abs() < window


def _visible(row: AttentionRow, causal: Tensor) -> Tensor:
    """``[W, W]``; what a row is filled up with sees itself, and nobody else sees it."""
    if row.visible is Visible.CAUSAL:
        return causal
    if row.visible is Visible.ALL:
        return torch.ones_like(causal)
    visible = torch.eye(len(causal), dtype=torch.bool, device=causal.device)
    visible[: row.width, : row.width] = row.visible.to(causal.device)
    return visible


def _additive(visible: Tensor, dtype: torch.dtype, hidden: float) -> Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, hidden)
