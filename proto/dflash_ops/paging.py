"""From page tables to slots. A slot is the place of one token in a pool."""

from __future__ import annotations

import torch
from torch import Tensor


def slots_of(page_ids: list[int], start: int, end: int, page_size: int) -> list[int]:
    """Return the slots of positions ``[start, end)`` of a sequence.

    Args:
        page_ids: the sequence's page table; must cover ``end`` positions.
        start: first position.
        end: one past the last position.
        page_size: tokens per page.
    """
    slots: list[int] = []
    position = start
    while position < end:
        page, offset = divmod(position, page_size)
        count = min(page_size - offset, end - position)
        first = page_ids[page] * page_size + offset
        slots.extend(range(first, first + count))
        position += count
    return slots


def slots_tensor(
    page_ids: list[int], start: int, end: int, page_size: int, device: torch.device
) -> Tensor:
    """``slots_of`` as int64 on ``device``."""
    return torch.tensor(
        slots_of(page_ids, start, end, page_size), dtype=torch.int64, device=device
    )
