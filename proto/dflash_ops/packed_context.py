"""The committed context of all rows of a pass, as kernels with a page table want it.

The same metadata serves every form of the attention over it (``context_attention``), on CPU and GPU; only the
form differs. Nothing here waits for the device.

Shape letters: T packed queries, R rows, P pages per row in the table, H query heads, G key/value heads,
D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dflash_ops.paging import PagedPool
from dflash_ops.visibility import AttentionRow


@dataclass(slots=True)
class PackedContext:
    """Which context each packed query reads: all of its row's, none of it masked.

    Rows follow each other in the packed order and cover it. Table entries behind a row's context are any
    valid page; they are never looked at.
    """

    pool: PagedPool
    """Lies by page."""
    starts: Tensor
    """``[R + 1]`` int32: row r has queries ``[starts[r], starts[r + 1])``."""
    most_queries: int
    """Of one row."""
    page_table: Tensor
    """``[R, P]`` int32."""
    lengths: Tensor
    """``[R]`` int32: committed positions."""
    total: int | None = None
    """Sum of ``lengths`` where the host knows it; None: at most what the table holds."""
    _gathered: tuple[Tensor, Tensor] | None = field(default=None, init=False)

    @property
    def capacity(self) -> int:
        """Positions that the table holds for one row."""
        return self.page_table.shape[1] * self.pool.page_size

    def slots(self) -> Tensor:
        """``[R, capacity]`` int64: where the positions of every row lie."""
        size = self.pool.page_size
        offsets = torch.arange(size, device=self.page_table.device)
        return (self.page_table.long()[..., None] * size + offsets).flatten(1)

    def gathered(self) -> tuple[Tensor, Tensor]:
        """Slots of all rows' context one after another, for kernels without a page table.

        Returns:
            slots ``[total]`` int64, or ``[R * capacity]`` with any at its end when the total is not known;
            and where rows begin and end in them ``[R + 1]`` int32.
        """
        if self._gathered is None:
            lengths = self.lengths.long()
            ends = lengths.cumsum(0)  # [R]
            slots = self.slots()
            place = torch.arange(self.capacity, device=slots.device)
            nowhere = slots.numel()
            target = (ends - lengths)[:, None] + place
            target = target.masked_fill(place >= lengths[:, None], nowhere)
            packed = slots.new_zeros(nowhere + 1).scatter_(0, target.flatten(), slots.flatten())
            count = nowhere if self.total is None else self.total
            bounds = torch.cat([ends.new_zeros(1), ends]).int()
            self._gathered = packed[:count], bounds
        return self._gathered

    def rows(self, num_queries: int) -> Tensor:
        """``[T]`` int64: the row of every query."""
        queries = torch.arange(num_queries, dtype=torch.int32, device=self.starts.device)
        return torch.searchsorted(self.starts[1:], queries, right=True)


def pack_context(rows: Sequence[AttentionRow], pool: PagedPool) -> PackedContext | None:
    """Collect the context of a pass's rows; None when no row has any.

    Args:
        rows: in packed order, which they cover; all of their context is read.
        pool: lies by page.
    """
    assert all(row.num_unread == 0 for row in rows)
    lengths = [row.context for row in rows]
    if not any(lengths):
        return None
    size = pool.page_size
    used = [row.page_ids[: -(-row.context // size)] for row in rows]
    num_pages = max(map(len, used))
    table = [mine + [0] * (num_pages - len(mine)) for mine in used]
    starts = [row.offset for row in rows] + [rows[-1].offset + rows[-1].width]
    device = pool.device
    return PackedContext(
        pool,
        torch.tensor(starts, dtype=torch.int32, device=device),
        max(row.width for row in rows),
        torch.tensor(table, dtype=torch.int32, device=device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        sum(lengths),
    )
