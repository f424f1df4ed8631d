"""The only owner of pages: which sequence holds which page of both pools.

A page is ``page_size`` slots of the verifier's KV pool and, under the same id, of every drafter's
context pool. So no pool can hold a position that another lost, and a prefix that is cached for the
verifier is cached for the drafter of the sequence that computed it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from gateway.coordinator.prefix_cache import PrefixCache


class PageAllocator:
    """Page tables of all running sequences, pages that only the prefix cache knows, and free pages.

    Owner: the planner; the driver thread alone mutates it. Other threads may read the ``num_*``
    properties.

    Invariants (``check_integrity``): every page is free, idle in the prefix cache, or held by one or more
    tables, exactly one of the three; a page that several tables hold is full and is never written again.
    """

    def __init__(self, num_pages: int, page_size: int, num_drafters: int = 1) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._prefixes = PrefixCache(num_drafters)
        self._num_unused = num_pages
        self._is_free = np.ones(num_pages, dtype=np.bool_)
        self._num_holders = [0] * num_pages
        self._tables: dict[int, list[int]] = {}

    @property
    def num_free(self) -> int:
        """Pages that a sequence could get: unused ones and idle ones."""
        return self._num_unused + self._prefixes.num_idle

    @property
    def num_idle(self) -> int:
        """Pages that only the prefix cache knows."""
        return self._prefixes.num_idle

    def pages_for(self, num_positions: int) -> int:
        """Return how many pages ``num_positions`` positions need."""
        return -(-num_positions // self.page_size)

    def table(self, seq_id: int) -> list[int]:
        """Return a copy of the sequence's page table, in position order; empty if it has none."""
        return self._tables.get(seq_id, []).copy()

    # ----- prefixes -----------------------------------------------------------------------------

    def match(self, names: Sequence[bytes], context: int | None) -> list[int]:
        """Return the pages of the longest cached beginning of ``names``. Does not mutate.

        Args:
            names: from ``PageNames``.
            context: the drafter whose context the pages must have; None takes any page.
        """
        return self._prefixes.match(names, context)

    def can_start(self, cached_pages: Sequence[int], num_positions: int) -> bool:
        """Whether a new sequence could adopt ``cached_pages`` and grow to ``num_positions``."""
        num_woken = sum(not self._num_holders[page_id] for page_id in cached_pages)
        num_new = self.pages_for(num_positions) - len(cached_pages)
        return num_new <= self.num_free - num_woken

    def adopt(self, seq_id: int, cached_pages: Sequence[int]) -> None:
        """Begin a sequence's table with pages that ``match`` has just returned. Mutates."""
        for page_id in cached_pages:
            if not self._num_holders[page_id]:
                self._prefixes.wake(page_id)
            self._num_holders[page_id] += 1
        if cached_pages:
            self._tables[seq_id] = list(cached_pages)

    def name_pages(
        self, seq_id: int, names: Sequence[bytes], context: int | None, first: int = 0
    ) -> None:
        """Make pages ``first`` to ``len(names) - 1`` of a table findable. Mutates.

        Args:
            seq_id: a sequence whose table covers them; they are full and committed.
            names: from ``PageNames``.
            context: the drafter whose context of these positions is complete too; None: none's.
            first: the pages before it have been named already.
        """
        table = self._tables.get(seq_id, [])
        for page_id, name in zip(table[first:], names[first:], strict=False):
            self._prefixes.name_page(page_id, name, context)

    def forget_prefixes(self) -> None:
        """Drop all cached prefixes: what the pools hold is in doubt. Mutates."""
        idle = self._prefixes.clear()
        self._is_free[idle] = True
        self._num_unused += len(idle)

    # ----- tables -------------------------------------------------------------------------------

    def ensure(self, seq_id: int, num_positions: int) -> bool:
        """Grow the sequence's table until it covers ``num_positions``. Mutates, all or nothing.

        New pages follow the table's last page if they can, else they are the lowest contiguous run
        that is long enough, else the lowest unused pages. Idle pages are given up when too few are unused.

        Returns:
            False, changing nothing, when too few pages are free.
        """
        table = self._tables.get(seq_id, [])
        num_missing = self.pages_for(num_positions) - len(table)
        if num_missing <= 0:
            return True
        if num_missing > self.num_free:
            return False
        while num_missing > self._num_unused:
            self._is_free[self._prefixes.give_up()] = True
            self._num_unused += 1
        page_ids = self._pick(num_missing, table[-1] if table else None)
        self._is_free[page_ids] = False
        self._num_unused -= num_missing
        for page_id in page_ids:
            self._num_holders[page_id] = 1
        self._tables.setdefault(seq_id, table).extend(page_ids)
        return True

    def release(self, seq_id: int) -> None:
        """Let go of the sequence's pages; nothing happens if it has none. Mutates.

        Pages with a name stay cached until they are needed, a sequence's last pages for the shortest
        time: a prefix is of no use without its beginning.
        """
        for page_id in reversed(self._tables.pop(seq_id, [])):
            self._num_holders[page_id] -= 1
            if self._num_holders[page_id]:
                continue
            if self._prefixes.knows(page_id):
                self._prefixes.rest(page_id)
            else:
                self._is_free[page_id] = True
                self._num_unused += 1

    def check_integrity(self) -> None:
        """Check that every page has its place. Does not mutate; for tests and debugging.

        Raises:
            RuntimeError: pages are lost, written by two sequences or counted wrongly.
        """
        held = Counter(page_id for table in self._tables.values() for page_id in table)
        unused = np.flatnonzero(self._is_free).tolist()
        everywhere = sorted([*unused, *self._prefixes.idle_pages, *held])
        if everywhere != list(range(self.num_pages)):
            raise RuntimeError(f"pages are lost or in two places: tables {self._tables}")
        if self._num_unused != len(unused):
            raise RuntimeError(f"{self._num_unused} pages counted unused, {len(unused)} are")
        for page_id, count in enumerate(self._num_holders):
            if count != held[page_id]:
                raise RuntimeError(f"page {page_id} has {held[page_id]} holders, {count} counted")
            if count > 1 and not self._prefixes.knows(page_id):
                raise RuntimeError(f"page {page_id} is shared but not a cached prefix")

    def _pick(self, count: int, after: int | None) -> list[int]:
        """Choose ``count`` of the unused pages, of which there are enough. Does not mutate."""
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
