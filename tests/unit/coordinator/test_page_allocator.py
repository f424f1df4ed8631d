"""The page allocator: order, contiguity, all-or-nothing growth, integrity."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.coordinator.page_allocator import PageAllocator


def test_lowest_ids_first() -> None:
    pages = PageAllocator(8, 4)
    assert pages.ensure(1, 9) and pages.table(1) == [0, 1, 2]
    assert pages.ensure(2, 1) and pages.table(2) == [3]
    pages.release(1)
    assert pages.ensure(3, 4) and pages.table(3) == [0]
    assert pages.num_free == 6


def test_growth_prefers_the_next_page() -> None:
    pages = PageAllocator(8, 1)
    pages.ensure(0, 2)
    pages.ensure(1, 3)
    pages.release(0)
    assert pages.ensure(1, 5) and pages.table(1) == [2, 3, 4, 5, 6]


def test_contiguous_run_before_scattered_pages() -> None:
    pages = PageAllocator(10, 1)
    for seq_id in range(8):
        pages.ensure(seq_id, 1)
    for seq_id in (0, 2, 4, 5, 6):
        pages.release(seq_id)
    assert pages.ensure(20, 3) and pages.table(20) == [4, 5, 6]
    # No run of three is left: the lowest free ids it is.
    assert pages.ensure(21, 3) and pages.table(21) == [0, 2, 8]


def test_growth_is_all_or_nothing() -> None:
    pages = PageAllocator(4, 2)
    assert pages.ensure(0, 4)
    assert not pages.ensure(1, 5)
    assert pages.table(1) == [] and pages.num_free == 2
    assert not pages.ensure(0, 9)
    assert pages.table(0) == [0, 1]
    assert pages.ensure(0, 8) and pages.num_free == 0
    assert not pages.ensure(2, 1)


def test_covered_positions_need_nothing() -> None:
    pages = PageAllocator(4, 4)
    pages.ensure(0, 5)
    assert pages.ensure(0, 8) and pages.ensure(0, 1) and pages.table(0) == [0, 1]


def test_release_of_a_stranger_is_harmless() -> None:
    pages = PageAllocator(4, 4)
    pages.release(7)
    assert pages.num_free == 4
    pages.check_integrity()


def test_table_is_a_copy() -> None:
    pages = PageAllocator(4, 4)
    pages.ensure(0, 4)
    pages.table(0).append(3)
    assert pages.table(0) == [0]


def test_integrity_check_sees_damage() -> None:
    stolen = PageAllocator(4, 4)
    stolen.ensure(0, 4)
    stolen._tables[1] = [0]
    shared = PageAllocator(4, 4)
    shared.ensure(0, 4)
    shared.adopt(1, [0])
    lost = PageAllocator(4, 4)
    lost._is_free[2] = False
    miscounted = PageAllocator(4, 4)
    miscounted._num_unused = 3
    for pages in (stolen, shared, lost, miscounted):
        with pytest.raises(RuntimeError):
            pages.check_integrity()


@given(
    st.integers(1, 12),
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 70)), max_size=40),
)
def test_random_growth_and_release(
    num_pages: int, page_size: int, actions: list[tuple[int, int]]
) -> None:
    pages = PageAllocator(num_pages, page_size)
    for seq_id, num_positions in actions:
        before = pages.table(seq_id)
        if num_positions == 0:
            pages.release(seq_id)
            assert pages.table(seq_id) == []
        else:
            needed = -(-num_positions // page_size) - len(before)
            fits = needed <= pages.num_free
            assert pages.ensure(seq_id, num_positions) == fits
            after = pages.table(seq_id)
            assert after[: len(before)] == before
            assert len(after) - len(before) == (max(0, needed) if fits else 0)
        pages.check_integrity()
