"""The only owner of pages: which sequence holds which page of both pools.

A page is ``page_size`` slots of the verifier's KV pool and, under the same id, of the drafter's
context pool. So neither pool can hold a position that the other lost.
"""

from __future__ import annotations

import numpy as np


class PageAllocator:
    """Page tables of all running sequences and the pages nobody holds.

    Owner: the planner; the driver thread alone mutates it. Other threads may read ``num_free``.

    Invariants (``check_integrity``): every page is free or in exactly one table, exactly once.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._num_free = num_pages
        self._is_free = np.ones(num_pages, dtype=np.bool_)
        self._tables: dict[int, list[int]] = {}

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return self._num_free

    def pages_for(self, num_positions: int) -> int:
        """Return how many pages ``num_positions`` positions need."""
        return -(-num_positions // self.page_size)

    def table(self, seq_id: int) -> list[int]:
        """Return a copy of the sequence's page table, in position order; empty if it has none."""
        return self._tables.get(seq_id, []).copy()

    def ensure(self, seq_id: int, num_positions: int) -> bool:
        """Grow the sequence's table until it covers ``num_positions``. Mutates, all or nothing.

        New pages follow the table's last page if they can, else they are the lowest contiguous run
        that is long enough, else the lowest free pages.

        Returns:
            False, changing nothing, when too few pages are free.
        """
        table = self._tables.get(seq_id, [])
        num_missing = self.pages_for(num_positions) - len(table)
        if num_missing <= 0:
            return True
        if num_missing > self._num_free:
            return False
        page_ids = self._pick(num_missing, table[-1] if table else None)
        self._is_free[page_ids] = False
        self._num_free -= num_missing
        self._tables.setdefault(seq_id, table).extend(page_ids)
        return True

    def release(self, seq_id: int) -> None:
        """Free all pages of the sequence; nothing happens if it has none. Mutates."""
        page_ids = self._tables.pop(seq_id, [])
        self._is_free[page_ids] = True
        self._num_free += len(page_ids)

    def check_integrity(self) -> None:
        """Check that every page has exactly one owner. Does not mutate; for tests and debugging.

        Raises:
            RuntimeError: pages are lost, shared or counted wrongly.
        """
        held = [page_id for table in self._tables.values() for page_id in table]
        everything = np.sort(np.concatenate([np.flatnonzero(self._is_free), np.array(held, int)]))
        if not np.array_equal(everything, np.arange(self.num_pages)):
            raise RuntimeError(f"pages are lost or shared: tables {self._tables}")
        if self._num_free + len(held) != self.num_pages:
            raise RuntimeError(f"{self._num_free} pages counted free, {len(held)} held")

    def _pick(self, count: int, after: int | None) -> list[int]:
        """Choose ``count`` of the free pages, of which there are enough. Does not mutate."""
        if after is not None and self._is_run(after + 1, count):
            return list(range(after + 1, after + 1 + count))
        if count == 1:
            return [int(self._is_free.argmax())]
        free = np.flatnonzero(self._is_free)
        # free is ascending, so free[i] starts a run exactly if free[i + count - 1] is as near as
        # distinct integers can be.
        starts = np.flatnonzero(free[count - 1 :] - free[: len(free) - count + 1] == count - 1)
        first = int(starts[0]) if len(starts) else 0
        picked: list[int] = free[first : first + count].tolist()
        return picked

    def _is_run(self, first: int, count: int) -> bool:
        end = first + count
        return end <= self.num_pages and bool(self._is_free[first:end].all())
