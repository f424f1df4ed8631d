"""Features reach the drafter before it drafts and before they are overwritten, in batches if it may wait."""

from __future__ import annotations

import random

import pytest
from coordinator_fakes import Bench, make_limits, make_request
from toy_target import DRAFTERS

from gateway.coordinator.feeding import MOST_STEPS, FeatureRoom
from gateway.coordinator.policy import parse_policy
from gateway.coordinator.sequence import PendingIngest, Sequence

ROOMY = make_limits(num_pages=512, max_context=1024)


def test_a_half_is_overwritten_only_after_all_in_it_was_due() -> None:
    rng, room = random.Random(0), FeatureRoom(64)
    waiting: set[int] = set()
    in_flight: set[int] = set()
    for _ in range(3000):
        num_positions = rng.choice((1, 3, 8, 8, 40, 64))
        first, is_due = room.place(num_positions)
        mine = set(range(first, first + num_positions))
        assert max(mine) < 128
        if is_due:
            waiting.clear()
        assert not mine & waiting and not mine & in_flight
        waiting |= in_flight  # two steps in flight: the one before has not landed yet
        in_flight = mine


def test_features_wait_for_a_few_steps_only() -> None:
    room = FeatureRoom(10_000)
    due = [i for i in range(100) if room.place(1)[1]]
    assert due == [MOST_STEPS * (i + 1) - 1 for i in range(100 // MOST_STEPS)]


@pytest.mark.parametrize(
    ("pieces", "runs"),
    [
        ([(5, 1, 8), (9, 1, 9), (13, 1, 10)], [(5, 3, 8, 4)]),
        ([(5, 1, 8), (9, 1, 9), (14, 1, 10), (19, 1, 11)], [(5, 2, 8, 4), (14, 2, 10, 5)]),
        ([(5, 3, 8), (8, 1, 11), (12, 1, 12)], [(5, 4, 8, 1), (12, 1, 12, 1)]),
        ([(5, 1, 8), (2, 1, 9)], [(5, 1, 8, 1), (2, 1, 9, 1)]),
        ([(5, 1, 8), (9, 2, 9)], [(5, 1, 8, 1), (9, 2, 9, 1)]),
    ],
)
def test_evenly_spaced_tokens_are_one_run(
    pieces: list[tuple[int, int, int]], runs: list[tuple[int, int, int, int]]
) -> None:
    sequence = Sequence(make_request("r", 6), 20, parse_policy("adaptive", 16), 4)
    for piece in pieces:
        sequence.add_pending(PendingIngest(*piece))
    assert sequence.pending_ingests == [PendingIngest(*run) for run in runs]


@pytest.mark.parametrize("num_rows", [1, 5])
def test_plain_steps_feed_the_drafter_in_batches(num_rows: int) -> None:
    """A table that decodes plainly, as the block scheduler does where drafts do not pay."""
    bench = Bench(ROOMY, policy="table", cohorts=(1,))
    bench.coordinator.learning.scheduler.table.width = lambda num_rows: 1  # type: ignore[method-assign]
    for i in range(num_rows):
        bench.submit(make_request(f"r{i}", 5, 200, seed=i))
    bench.run_until_idle()
    bench.check_all_finished()
    plans = bench.ring.plans
    fed = [len(plan.ingests) for plan in plans if plan.ingests]
    assert len(plans) / MOST_STEPS - 2 < len(fed) < len(plans) / MOST_STEPS + 2
    # Prefills of several rows end in one step, so all later tokens of a row are one run.
    assert set(fed[1:]) == {num_rows}


def test_a_prompt_can_be_shared_after_a_short_plain_answer() -> None:
    bench = Bench(ROOMY, policy="table", cohorts=(1,))
    bench.coordinator.learning.scheduler.table.width = lambda num_rows: 1  # type: ignore[method-assign]
    for name in ("first", "second"):
        bench.submit(make_request(name, 42, 4, family=1))
        bench.run_until_idle()
    bench.check_all_finished()
    assert bench.sink.chunks["second"][0].num_cached_tokens == 40


@pytest.mark.parametrize("cohorts", [(1,), (2,)])
@pytest.mark.parametrize("period", [3, 7, 40])
def test_drafts_after_plain_steps_find_their_context(cohorts: tuple[int, ...], period: int) -> None:
    """The ring checks that the drafter knows all positions before each draft, with the right features."""
    limits = make_limits(num_pages=512, max_context=1024, max_step_positions=32)
    bench = Bench(limits, DRAFTERS["always_right"], "off", cohorts=cohorts)
    bench.coordinator.set_policy("table")
    asked = 0

    def width(num_rows: int) -> int:
        nonlocal asked
        asked += 1
        return 1 if asked // 4 % period else 4

    bench.coordinator.learning.scheduler.table.width = width  # type: ignore[method-assign]
    for i in range(4):
        bench.submit(make_request(f"r{i}", 5 + 20 * i, 300, seed=i))
    bench.run_until_idle()
    bench.check_all_finished()
    widths = {row.width for plan in bench.ring.plans for row in plan.rows if not row.is_prefill}
    assert {1, 4} <= widths
