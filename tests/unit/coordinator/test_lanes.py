"""Which lane a request goes to, and what lanes are asked about it."""

from __future__ import annotations

import pytest
from coordinator_fakes import Bench, make_request
from hypothesis import given
from hypothesis import strategies as st

from gateway.coordinator.lanes import MAX_EXTRA_LOAD, choose_lane


@pytest.mark.parametrize(
    ("num_live", "num_cached", "lane"),
    [
        ([0, 0], [0, 0], 0),
        ([1, 0], [0, 0], 1),
        ([1, 0], [3, 0], 0),
        ([1, 0], [3, 3], 1),
        ([MAX_EXTRA_LOAD, 0], [1, 0], 0),
        ([MAX_EXTRA_LOAD + 1, 0], [9, 0], 1),
        ([MAX_EXTRA_LOAD + 1, 2, 0], [9, 5, 0], 1),
        ([7], [0], 0),
    ],
)
def test_choices(num_live: list[int], num_cached: list[int], lane: int) -> None:
    assert choose_lane(num_live, num_cached) == lane


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), min_size=1, max_size=5))
def test_no_prefix_is_worth_more_than_the_bound(lanes: list[tuple[int, int]]) -> None:
    num_live, num_cached = zip(*lanes, strict=True)
    chosen = choose_lane(num_live, num_cached)
    assert num_live[chosen] <= min(num_live) + MAX_EXTRA_LOAD
    # Who is passed over has less of the prefix, or is too busy.
    for load, cached in lanes:
        is_better = (cached, -load) > (num_cached[chosen], -num_live[chosen])
        assert not is_better or load > min(num_live) + MAX_EXTRA_LOAD


def test_a_prepared_sequence_can_go_to_any_lane() -> None:
    lanes = [Bench(), Bench()]
    lanes[1].submit(make_request("before", 22, 8, family=0))
    lanes[1].run_until_idle()
    request = make_request("r", 22, 8, family=0, seed=1)
    sequence = lanes[0].coordinator.prepare(request)
    assert [lane.coordinator.num_cached_pages(sequence) for lane in lanes] == [0, 5]
    assert [lane.coordinator.num_live for lane in lanes] == [0, 0]
    lanes[1].coordinator.enqueue(sequence)
    lanes[1].requests["r"] = request
    assert [lane.coordinator.num_live for lane in lanes] == [0, 1]
    lanes[1].run_until_idle()
    lanes[1].check_finished("r")
    assert lanes[1].sink.chunks["r"][0].num_cached_tokens == 20
    assert lanes[1].coordinator.num_live == 0
