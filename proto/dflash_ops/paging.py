"""Paged pools: one place for target keys/values and for the drafter's context.

A *slot* is the place of one token in a pool: ``page_id * page_size + offset``. Page tables come with
every plan; a pool knows nothing about sequences, so a replaced executor starts with an empty one.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Protocol

import torch
from torch import Tensor


class PoolLayout(Enum):
    """How a pool's elements lie in memory; what a slot means is the same in each."""

    BY_HEAD = auto()
    """The slots of one head follow each other: ``[L, 2, G, slots, D]``. A product over a context on
    consecutive pages then reads one piece of memory per head."""
    BY_PAGE = auto()
    """A page is one piece, ``[L, 2, pages, page_size, G, D]``, as kernels with a page table want it."""


class ContextReader(Protocol):
    """Keys and values of one sequence's committed positions."""

    def layer(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Return one layer's keys and values, ``[1, G, C, D]`` each."""


class _RunReader:
    """Context on pages that follow each other: views into the pool, nothing is copied."""

    def __init__(self, layers: list[tuple[Tensor, Tensor]], start: int, count: int) -> None:
        self._layers, self._start, self._count = layers, start, count

    def layer(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """See ``ContextReader``."""
        key, value = self._layers[layer_idx]
        return key.narrow(2, self._start, self._count), value.narrow(2, self._start, self._count)


class _ScatteredReader:
    """Context on pages anywhere: whole pages are copied, one layer at a time."""

    def __init__(
        self, pages: Tensor, page_ids: Tensor, start: int, count: int, head_dim: int
    ) -> None:
        self._pages, self._page_ids, self._head_dim = pages, page_ids, head_dim
        self._start, self._end = start, start + count

    def layer(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """See ``ContextReader``."""
        gathered = self._pages[layer_idx].index_select(
            2, self._page_ids
        )  # [2, G, n, page_size * D]
        kv = gathered.unflatten(3, (-1, self._head_dim)).flatten(2, 3)[:, None]
        kv = kv[:, :, :, self._start : self._end]
        return kv[0], kv[1]


class _PageReader:
    """The same for pages that are one piece each."""

    def __init__(self, pages: Tensor, page_ids: Tensor, start: int, count: int) -> None:
        self._pages, self._page_ids = pages, page_ids
        self._start, self._end = start, start + count

    def layer(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """See ``ContextReader``."""
        gathered = self._pages[layer_idx].index_select(1, self._page_ids)  # [2, n, page_size, G, D]
        kv = gathered.flatten(1, 2)[:, self._start : self._end].transpose(1, 2)[:, None]
        return kv[0], kv[1]


class PagedPool:
    """Keys and values by slot.

    Owner: the executor that holds it; only that executor writes. Invariant: it never holds
    speculative state, because only committed positions are written.

    ``data`` is a view ``[layers, slots, 2, G, D]``, whatever the layout.

    Args:
        num_layers: layers with their own keys and values.
        num_pages: pages of ``page_size`` tokens.
        page_size: tokens per page.
        num_kv_heads: key/value heads per layer.
        head_dim: size of one head.
        dtype: element type.
        device: where the pool lives.
        layout: see ``PoolLayout``; who computes attention decides.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        layout: PoolLayout = PoolLayout.BY_HEAD,
    ) -> None:
        self.page_size = page_size
        self.num_slots = num_pages * page_size
        self.layout = layout
        self._head_dim = head_dim
        self._offsets = torch.arange(page_size, device=device)
        if layout is PoolLayout.BY_PAGE:
            shape = (num_layers, 2, num_pages, page_size, num_kv_heads, head_dim)
            self._pages = torch.zeros(shape, dtype=dtype, device=device)
            slots = self._pages.flatten(2, 3)  # [L, 2, slots, G, D]
            self.data = slots.transpose(1, 2)
            by_head = slots.transpose(2, 3)
        else:
            by_head = torch.zeros(
                (num_layers, 2, num_kv_heads, self.num_slots, head_dim), dtype=dtype, device=device
            )
            self._pages = by_head.view(num_layers, 2, num_kv_heads, num_pages, -1)
            self.data = by_head.permute(0, 3, 1, 2, 4)
        # Keys and values [1, G, slots, D] by layer: making these views anew costs more than reading them.
        self._layers = [(layer[0][None], layer[1][None]) for layer in by_head]

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the pool."""
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        """Device of the pool."""
        return self.data.device

    def pages(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """One layer's keys and values ``[pages, page_size, G, D]`` each: views; the pool lies by page."""
        assert self.layout is PoolLayout.BY_PAGE
        key, value = self._pages[layer_idx]
        return key, value

    def slots(self, page_ids: list[int], start: int, end: int) -> Tensor:
        """Return the slots ``[end - start]`` int64 of positions ``[start, end)``; reads nothing.

        Args:
            page_ids: the sequence's page table; covers at least ``end`` positions.
            start: first position.
            end: one past the last position.
        """
        first, last = start // self.page_size, -(-end // self.page_size)
        pages = torch.tensor(page_ids[first:last], dtype=torch.int64, device=self.device)
        slots = (pages[:, None] * self.page_size + self._offsets).flatten()
        skipped = first * self.page_size
        return slots[start - skipped : end - skipped]

    def reader(self, page_ids: list[int], num_positions: int, first: int = 0) -> ContextReader:
        """Prepare reading positions ``[first, num_positions)``, at least one, of a sequence.

        Args:
            page_ids: the sequence's page table; covers the positions.
            num_positions: committed ones; what lies behind them on the last page is not read.
            first: pages in front of it are not read either.
        """
        skipped = first // self.page_size
        used = page_ids[skipped : -(-num_positions // self.page_size)]
        page, start, count = used[0], first - skipped * self.page_size, num_positions - first
        if used == list(range(page, page + len(used))):
            return _RunReader(self._layers, page * self.page_size + start, count)
        index = torch.tensor(used, dtype=torch.int64, device=self.device)
        if self.layout is PoolLayout.BY_PAGE:
            return _PageReader(self._pages, index, start, count)
        return _ScatteredReader(self._pages, index, start, count, self._head_dim)

    def write(self, slots: Tensor, kv: Tensor) -> None:
        """Write committed tokens; mutates the pool.

        Args:
            slots: ``[n]`` int64.
            kv: ``[num_layers, n, 2, G, D]``.
        """
        self.data.index_copy_(1, slots, kv)
