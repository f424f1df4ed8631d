"""PagedPool: where a position lives, and that writing touches nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ops.paging import PagedPool, PoolLayout

pytestmark = pytest.mark.unit


CPU = torch.device("cpu")


def make_pool(num_pages: int, page_size: int, layout: PoolLayout = PoolLayout.BY_HEAD) -> PagedPool:
    return PagedPool(2, num_pages, page_size, 1, 4, torch.float32, CPU, layout)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), page_size=st.integers(1, 7), num_pages=st.integers(1, 9))
def test_slots_equal_the_definition(data: st.DataObject, page_size: int, num_pages: int) -> None:
    page_ids = data.draw(st.permutations(range(num_pages)))
    end = data.draw(st.integers(0, num_pages * page_size))
    start = data.draw(st.integers(0, end))
    slots = make_pool(num_pages, page_size).slots(page_ids, start, end)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [
        page_ids[position // page_size] * page_size + position % page_size
        for position in range(start, end)
    ]


@pytest.mark.parametrize("layout", PoolLayout)
def test_write_changes_only_its_slots(layout: PoolLayout) -> None:
    pool = make_pool(5, 4, layout)
    pool.data.normal_()
    before = pool.data.clone()
    slots = pool.slots([4, 0, 2], 3, 9)
    kv = torch.randn(2, 6, 2, 1, 4)
    pool.write(slots, kv)
    assert torch.equal(pool.data[:, slots], kv)
    others = [slot for slot in range(pool.num_slots) if slot not in slots.tolist()]
    assert torch.equal(pool.data[:, others], before[:, others])


@pytest.mark.parametrize("num_positions", [1, 3, 4, 9, 12])
@pytest.mark.parametrize("page_ids", [[2, 3, 4], [4, 0, 2]], ids=["run", "scattered"])
@pytest.mark.parametrize("first", [0, 2, 5])
@pytest.mark.parametrize("layout", PoolLayout)
def test_readers_return_a_sequences_positions(
    page_ids: list[int], num_positions: int, first: int, layout: PoolLayout
) -> None:
    first = min(first, num_positions - 1)
    pool = PagedPool(3, 5, 4, 2, 6, torch.float32, CPU, layout)
    pool.data.normal_()
    slots = pool.slots(page_ids, first, num_positions)
    reader = pool.reader(page_ids, num_positions, first)
    for layer in range(3):
        key, value = reader.layer(layer)
        expected = pool.data[layer, slots].permute(1, 2, 0, 3)  # [2, G, C, D]
        assert torch.equal(key[0], expected[0]) and torch.equal(value[0], expected[1])


def test_pages_are_one_piece_each() -> None:
    pool = PagedPool(3, 5, 4, 2, 6, torch.float32, CPU, PoolLayout.BY_PAGE)
    pool.data.normal_()
    for part, pages in enumerate(pool.pages(1)):
        assert pages.shape == (5, 4, 2, 6) and pages.is_contiguous()
        assert torch.equal(pages.flatten(0, 1), pool.data[1, :, part])


@pytest.mark.parametrize("layout", PoolLayout)
def test_a_run_is_not_copied(layout: PoolLayout) -> None:
    pool = make_pool(5, 4, layout)
    pool.data.normal_()
    key, value = pool.reader([1, 2], 7).layer(1)
    for part in (key, value):
        assert part.untyped_storage().data_ptr() == pool.data.untyped_storage().data_ptr()
