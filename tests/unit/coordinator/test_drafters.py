"""Several drafters of one target: who drafts, whose context is kept, and what is counted."""

from __future__ import annotations

import pytest
from coordinator_fakes import Bench, make_limits, make_request
from toy_target import always_right, always_wrong

from dflash_wire.drafters import DrafterLimits
from dflash_wire.errors import ConfigError, InvalidRequestError

TWO = (DrafterLimits("default", 16), DrafterLimits("thinking", 8))


def two_drafters(**changes: int) -> Bench:
    """The default one is always right, the other never."""
    return Bench(make_limits(TWO, **changes), (always_right, always_wrong), "static:4")


def test_rows_and_ingests_name_the_drafter_of_their_sequence() -> None:
    bench = two_drafters()
    bench.submit(make_request("a", 5, 12, seed=1))
    bench.submit(make_request("b", 6, 12, seed=2, drafter="thinking"))
    bench.submit(make_request("c", 7, 12, seed=3, drafter="thinking", policy="off"))
    bench.run_until_idle()
    bench.check_all_finished()
    drafters = {
        (row.seq_id, row.drafter) for plan in bench.ring.plans for row in plan.rows if row.width > 1
    }
    assert drafters == {(0, 0), (1, 1)}
    ingests = {
        (ingest.start_position, ingest.drafter)
        for plan in bench.ring.plans
        for ingest in plan.ingests
    }
    assert {(0, 0), (0, 1)} <= ingests
    # The first step is prefill alone, then both draft; the one that is right ends sooner.
    routes = [plan.drafters for plan in bench.ring.plans]
    assert routes[0] == [] and routes[1] == [0, 1]
    assert routes[-2] == [1]


def test_ingests_tell_tokens_to_those_who_read_them() -> None:
    """Chunk by chunk, after preemption, and in runs of plain steps."""
    readers = (DrafterLimits("default", 16, reads_tokens=True), DrafterLimits("other", 8))
    bench = Bench(
        make_limits(readers, num_pages=30, max_step_positions=16),
        (always_right, always_wrong),
        "static:4",
    )
    for i in range(4):
        bench.submit(make_request(f"a{i}", 20, 60, seed=i, drafter="other" if i % 2 else None))
    bench.run_until_idle()
    bench.check_all_finished()  # the ring compares every token
    told = {
        (ingest.drafter, ingest.token_ids and len(ingest.token_ids) == ingest.num_tokens)
        for plan in bench.ring.plans
        for ingest in plan.ingests
    }
    assert told == {(0, True), (1, None)}
    assert bench.coordinator.snapshot().num_preemptions > 0


def test_each_drafter_has_acceptance_statistics_of_its_own() -> None:
    bench = two_drafters()
    bench.submit(make_request("a", 5, 13, seed=1))
    bench.submit(make_request("b", 6, 13, seed=2, drafter="thinking"))
    bench.submit(make_request("c", 7, 13, seed=3, policy="off"))
    bench.run_until_idle()
    totals = bench.coordinator.snapshot().totals
    right, wrong = totals.by_drafter
    assert (right.num_cycles, right.num_cycle_tokens, right.num_accepted_drafts) == (3, 12, 9)
    assert (wrong.num_cycles, wrong.num_cycle_tokens, wrong.num_accepted_drafts) == (12, 12, 0)
    # Plain decoding counts in the totals alone.
    assert totals.num_cycles == 3 + 12 + 12
    assert totals.num_draft_tokens == right.num_draft_tokens + wrong.num_draft_tokens


def test_a_snapshot_does_not_change_afterwards() -> None:
    bench = two_drafters()
    bench.submit(make_request("a", 5, 13))
    bench.step()
    bench.step()
    before = bench.coordinator.snapshot().totals.by_drafter[0]
    num_cycles = before.num_cycles
    bench.run_until_idle()
    assert before.num_cycles == num_cycles > 0


@pytest.mark.parametrize(
    ("first", "second", "num_cached"),
    [
        ({}, {}, 20),
        ({}, {"drafter": "default"}, 20),
        ({"drafter": "thinking"}, {"drafter": "thinking"}, 20),
        ({"drafter": "thinking"}, {}, 0),
        ({}, {"drafter": "thinking"}, 0),
        ({"policy": "off"}, {"drafter": "thinking"}, 0),
        ({"drafter": "thinking"}, {"policy": "off"}, 20),
    ],
)
def test_cached_prefixes_are_of_use_to_their_own_drafter(
    first: dict[str, str], second: dict[str, str], num_cached: int
) -> None:
    """FakeRing checks that the context which a draft reads is there and right."""
    bench = two_drafters()
    bench.submit(make_request("a", 22, 8, family=0, **first))
    bench.run_until_idle()
    bench.submit(make_request("b", 22, 8, family=0, seed=1, **second))
    bench.run_until_idle()
    bench.check_all_finished()
    assert bench.sink.chunks["b"][0].num_cached_tokens == num_cached


def test_unknown_drafters_are_refused_by_name() -> None:
    bench = two_drafters()
    with pytest.raises(InvalidRequestError, match="'default', 'thinking'") as caught:
        bench.coordinator.submit(make_request("a", drafter="fast"))
    assert caught.value.param == "dflash.drafter"
    with pytest.raises(InvalidRequestError, match="'default'"):
        Bench().coordinator.submit(make_request("a", drafter="thinking"))


def test_widths_are_those_of_the_chosen_drafter() -> None:
    bench = two_drafters()
    bench.submit(make_request("a", policy="static:16"))
    with pytest.raises(InvalidRequestError, match="from 2 to 8"):
        bench.coordinator.submit(make_request("b", policy="static:16", drafter="thinking"))


def test_the_default_policy_must_suit_every_drafter() -> None:
    with pytest.raises(ConfigError, match="from 2 to 8"):
        Bench(make_limits(TWO), (always_right, always_wrong), "static:16")


def test_a_lost_step_costs_no_drafter_its_context() -> None:
    """After a failed step all prefill again, and each drafter ingests again."""
    bench = two_drafters(max_rows=2)
    for i, drafter in enumerate(["default", "thinking", "thinking", None]):
        bench.submit(make_request(f"r{i}", 9, 20, seed=i, drafter=drafter, family=0))
    bench.step()
    bench.step()
    bench.ring.lose_everything()
    bench.coordinator._planner.preempt_all()
    bench.run_until_idle()
    bench.check_all_finished()
