"""Paged pools: one place for target keys/values and for the drafter's context.

A *slot* is the place of one token in a pool: ``page_id * page_size + offset``. Page tables come with
every plan; a pool knows nothing about sequences, so a replaced executor starts with an empty one.
"""

from __future__ import annotations

import torch
from torch import Tensor


class PagedPool:
    """Keys and values by slot.

    Owner: the executor that holds it; only that executor writes. Invariant: it never holds
    speculative state, because only committed positions are written; and
    only finite numbers, because a page's next owner may read what lies behind its own tokens under a
    mask, and a NaN times zero is a NaN.

    ``data`` is a view ``[layers, slots, 2, G, D]``; in memory a head's part of a page lies together, so
    that whole pages are gathered into what attention reads fastest.

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
        self._pages = torch.zeros(
            (num_layers, 2, num_kv_heads, num_pages, page_size * head_dim),
            dtype=dtype,
            device=device,
        )
        self.data = self._pages.view(num_layers, 2, num_kv_heads, self.num_slots, head_dim).permute(
            0, 3, 1, 2, 4
        )
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

    def gather(self, layer_idx: int, page_ids: Tensor) -> Tensor:
        """Copy whole pages of one layer.

        Args:
            layer_idx: the layer.
            page_ids: ``[n]`` int64.

        Returns:
            ``[2, G, n, page_size * D]``.
        """
        return self._pages[layer_idx].index_select(2, page_ids)

    def write(self, slots: Tensor, kv: Tensor) -> None:
        """Write committed tokens; mutates the pool.

        Args:
            slots: ``[n]`` int64.
            kv: ``[num_layers, n, 2, G, D]``.
        """
        self.data.index_copy_(1, slots, torch.nan_to_num(kv))
