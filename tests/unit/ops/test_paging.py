"""PagedPool: where a position lives, and that writing touches nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ops.paging import PagedPool

pytestmark = pytest.mark.unit


def make_pool(num_pages: int, page_size: int) -> PagedPool:
    return PagedPool(2, num_pages, page_size, 1, 4, torch.float32, torch.device("cpu"))


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


def test_write_changes_only_its_slots() -> None:
    pool = make_pool(5, 4)
    pool.data.normal_()
    before = pool.data.clone()
    slots = pool.slots([4, 0, 2], 3, 9)
    kv = torch.randn(2, 6, 2, 1, 4)
    pool.write(slots, kv)
    assert torch.equal(pool.data[:, slots], kv)
    others = [slot for slot in range(pool.num_slots) if slot not in slots.tolist()]
    assert torch.equal(pool.data[:, others], before[:, others])


def test_a_page_never_holds_what_a_mask_cannot_hide() -> None:
    """The next owner of the page may read the rest of it under a mask; NaN times zero is NaN."""
    pool = make_pool(1, 4)
    kv = torch.full((2, 1, 2, 1, 4), torch.nan)
    kv[0, 0, 1, 0] = torch.tensor([torch.inf, -torch.inf, 1.0, torch.nan])
    pool.write(torch.tensor([2]), kv)
    assert bool(torch.isfinite(pool.data).all())
    assert pool.data[0, 2, 1, 0, 2] == 1.0
