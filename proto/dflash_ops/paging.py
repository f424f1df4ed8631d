"""Paged pools: one place for target keys/values and for the drafter's context.

A *slot* is the place of one token in a pool: ``page_id * page_size + offset``. Page tables come with
every plan; a pool knows nothing about sequences, so a replaced executor starts with an empty one.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


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


class PagedPool:
    """Keys and values by slot.

    Owner: the executor that holds it; only that executor writes. Invariant: it never holds
    speculative state, because only committed positions are written.

    ``data`` is a view ``[layers, slots, 2, G, D]``; in memory the slots of one head follow each other, as
    attention reads them.

    Args:
        num_layers: layers with their own keys and values.
        num_pages: pages of ``page_size`` tokens.
        page_size: tokens per page.
        num_kv_heads: key/value heads per layer.
        head_dim: size of one head.
        dtype: element type.
        device: where the pool lives.
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
    ) -> None:
        self.page_size = page_size
        self.num_slots = num_pages * page_size
        self._slots = torch.zeros(
            (num_layers, 2, num_kv_heads, self.num_slots, head_dim), dtype=dtype, device=device
        )
        self._pages = self._slots.view(num_layers, 2, num_kv_heads, num_pages, -1)
        self.data = self._slots.permute(0, 3, 1, 2, 4)
        # Keys and values [1, G, slots, D] by layer: making these views anew costs more than reading them.
        self._layers = [(layer[0][None], layer[1][None]) for layer in self._slots]
        self._offsets = torch.arange(page_size, device=device)

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the pool."""
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        """Device of the pool."""
        return self.data.device

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
        return _ScatteredReader(self._pages, index, start, count, self._slots.shape[-1])

    def write(self, slots: Tensor, kv: Tensor) -> None:
        """Write committed tokens; mutates the pool.

        Args:
            slots: ``[n]`` int64.
            kv: ``[num_layers, n, 2, G, D]``.
        """
        self.data.index_copy_(1, slots, kv)
