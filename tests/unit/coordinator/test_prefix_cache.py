"""Prefix cache: names, sharing, eviction, and what it does to requests."""

from __future__ import annotations

import pytest
from coordinator_fakes import Bench, make_limits, make_request
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_target import always_wrong

from dflash_wire.errors import EngineUnavailableError
from dflash_wire.records import StepPlan, StepResult
from gateway.coordinator.page_allocator import PageAllocator
from gateway.coordinator.prefix_cache import PageNames


def names_of(token_ids: list[int], page_size: int = 4, salt: str = "") -> list[bytes]:
    return PageNames(page_size, salt).of(token_ids, len(token_ids))


def cached(bench: Bench, request_id: str) -> int | None:
    return bench.sink.chunks[request_id][0].num_cached_tokens


def run(bench: Bench, *requests: object) -> None:
    for request in requests:
        bench.submit(request)  # type: ignore[arg-type]
    bench.run_until_idle()
    bench.check_all_finished()


# ----- names ------------------------------------------------------------------------------------


def test_a_name_stands_for_the_whole_prefix() -> None:
    names = names_of(list(range(11)))
    assert len(names) == len(set(names)) == 2
    assert names_of(list(range(8))) == names
    assert names_of([9, *range(1, 11)])[1] != names[1], "another first page"
    assert names_of([0, 1, 2, 3, 4, 5, 6, 8])[0] == names[0]
    assert names_of(list(range(8)), salt="s")[0] != names[0]
    # The same page content behind another prefix is another page.
    assert names_of([1, 2, 3, 4, 1, 2, 3, 4])[0] != names_of([1, 2, 3, 4, 1, 2, 3, 4])[1]


def test_names_grow_with_the_tokens() -> None:
    names, token_ids = PageNames(3, ""), list(range(7))
    assert names.of(token_ids, 2) == []
    assert len(names.of(token_ids, 5)) == 1
    token_ids += [7, 8, 9]
    assert names.of(token_ids, 10) == names_of(list(range(10)), 3)
    assert names.of(token_ids, 6) == names_of(list(range(6)), 3), "shorter beginnings still work"


# ----- allocator --------------------------------------------------------------------------------


def test_released_pages_are_found_until_they_are_needed() -> None:
    pages = PageAllocator(4, 2)
    names = names_of([1, 2, 3, 4], 2)
    pages.ensure(0, 5)
    pages.name_pages(0, names, context=0)
    pages.release(0)
    assert (pages.num_free, pages.num_idle) == (4, 2)
    assert pages.match(names, context=0) == [0, 1]
    pages.ensure(1, 4)
    assert pages.table(1) == [2, 3], "unused pages go first"
    pages.ensure(2, 1)
    assert pages.table(2) == [1], "then the end of the oldest prefix"
    assert pages.match(names, context=0) == [0]
    pages.check_integrity()


def test_a_shared_page_returns_when_its_last_holder_does() -> None:
    pages = PageAllocator(3, 2)
    names = names_of([1, 2], 2)
    pages.ensure(0, 3)
    pages.name_pages(0, names, context=0)
    pages.adopt(1, pages.match(names, context=0))
    pages.check_integrity()
    pages.release(0)
    assert (pages.num_free, pages.num_idle) == (2, 0)
    pages.release(1)
    assert (pages.num_free, pages.num_idle) == (3, 1)


def test_waking_idle_pages_does_not_count_them_twice() -> None:
    pages = PageAllocator(3, 2)
    names = names_of([1, 2, 3, 4], 2)
    pages.ensure(0, 4)
    pages.name_pages(0, names, context=0)
    pages.release(0)
    hits = pages.match(names, context=0)
    assert pages.can_start(hits, 6)
    assert not pages.can_start(hits, 7)
    assert pages.can_start([], 6) and not pages.can_start([], 7)


def test_pages_without_context_serve_only_who_needs_none() -> None:
    pages = PageAllocator(4, 2)
    names = names_of([1, 2], 2)
    pages.ensure(0, 2)
    pages.name_pages(0, names, context=None)
    assert pages.match(names, context=None) == [0]
    assert pages.match(names, context=0) == []
    pages.ensure(1, 2)
    pages.name_pages(1, names, context=0)
    assert pages.match(names, context=0) == pages.match(names, context=None) == [1]


def test_pages_with_the_context_of_one_drafter_are_of_no_use_to_another() -> None:
    pages = PageAllocator(4, 2, num_drafters=2)
    names = names_of([1, 2], 2)
    pages.ensure(0, 2)
    pages.name_pages(0, names, context=1)
    assert pages.match(names, context=0) == []
    assert pages.match(names, context=1) == pages.match(names, context=None) == [0]
    pages.ensure(1, 2)
    pages.name_pages(1, names, context=0)
    assert [pages.match(names, context) for context in (0, 1)] == [[1], [0]]


@settings(max_examples=200, deadline=None)
@given(
    num_pages=st.integers(1, 10),
    actions=st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(0, 1),
            st.integers(0, 14),
            st.sampled_from([None, 0, 1]),
        ),
        max_size=40,
    ),
)
def test_random_sharing(num_pages: int, actions: list[tuple[int, int, int, int | None]]) -> None:
    """Free, idle and held pages always add up, and a match is always a beginning."""
    pages, running = PageAllocator(num_pages, 2, num_drafters=2), {}
    for seq_id, family, length, context in actions:
        if seq_id in running:
            pages.name_pages(seq_id, *running.pop(seq_id))
            pages.check_integrity()
            pages.release(seq_id)
        else:
            names = names_of([100 * family + i for i in range(length)], 2)
            hits = pages.match(names, context)
            assert len(hits) <= len(names) and len(set(hits)) == len(hits)
            if pages.can_start(hits, length):
                pages.adopt(seq_id, hits)
                assert pages.ensure(seq_id, length)
                assert pages.table(seq_id)[: len(hits)] == hits
                running[seq_id] = (names, context)
        pages.check_integrity()


# ----- requests ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["off", "static:4"])
def test_a_repeated_prompt_computes_only_its_end(policy: str) -> None:
    bench = Bench(policy=policy)
    run(bench, make_request("a", 22, 8, family=0))
    run(bench, make_request("b", 22, 8, family=0, seed=1), make_request("c", 23, 8, family=0))
    assert cached(bench, "a") == 0
    # 22 tokens fill five pages of 4; the last token is always computed.
    assert cached(bench, "b") == cached(bench, "c") == 20
    prefills = [row for plan in bench.ring.plans for row in plan.rows if row.is_prefill]
    assert [row.num_positions for row in prefills] == [22, 2, 3]


@pytest.mark.parametrize("policy", ["off", "static:4"])
def test_the_last_prompt_token_is_computed_even_if_all_pages_are_cached(policy: str) -> None:
    bench = Bench(policy=policy)
    run(bench, make_request("a", 20, 8, family=0))
    run(bench, make_request("b", 20, 8, family=0, seed=1))
    assert cached(bench, "b") == 16, "five pages of 4 are known, the last of them is not taken"


def test_only_the_first_chunk_tells() -> None:
    bench = Bench()
    run(bench, make_request("a", 8, 12))
    told = [chunk.num_cached_tokens for chunk in bench.sink.chunks["a"]]
    assert told == [0] + [None] * (len(told) - 1)


def test_the_next_turn_finds_the_last_answer() -> None:
    bench = Bench()
    first = make_request("a", 9, 30)
    run(bench, first)
    prompt = [*first.prompt_token_ids, *bench.sink.tokens("a"), 1, 2, 3]
    second = make_request("b", len(prompt), 10)
    second.prompt_token_ids[:] = prompt
    run(bench, second)
    # All but what the last cycle wrote, whose features nobody ingests.
    assert 28 <= (cached(bench, "b") or 0) <= 36


def test_other_salts_and_switched_off_caches_share_nothing() -> None:
    bench = Bench()
    run(bench, make_request("a", 22, 8, family=0, salt="x"))
    run(bench, make_request("b", 22, 8, family=0), make_request("c", 22, 8, family=0, salt="y"))
    run(bench, make_request("d", 22, 8, family=0, salt="x"))
    assert [cached(bench, request_id) for request_id in "abcd"] == [0, 0, 0, 20]
    without = Bench(caches_prefixes=False)
    run(without, make_request("a", 22, 8, family=0))
    run(without, make_request("b", 22, 8, family=0))
    assert cached(without, "b") == 0
    assert without.coordinator.snapshot().num_idle_pages == 0


def test_a_policy_that_never_drafts_leaves_nothing_to_those_that_do() -> None:
    bench = Bench()
    run(bench, make_request("a", 22, 8, family=0, policy="off"))
    run(bench, make_request("b", 22, 8, family=0, policy="static:4"))
    run(bench, make_request("c", 22, 8, family=0, policy="off"))
    assert [cached(bench, request_id) for request_id in "abc"] == [0, 0, 20]


def test_a_preempted_sequence_finds_its_own_pages() -> None:
    limits = make_limits(num_pages=16, max_context=40, max_draft_block_size=4)
    bench = Bench(limits, always_wrong, "static:4")
    run(bench, *(make_request(f"r{i}", 8, 16, seed=i) for i in range(3)))
    assert bench.coordinator.snapshot().num_preemptions > 0
    again = [
        row
        for plan in bench.ring.plans
        for row in plan.rows
        if row.is_prefill and row.start_position > 0
    ]
    assert again, "a preempted sequence should not compute everything again"


def test_after_a_failed_step_nothing_cached_is_trusted() -> None:
    def fail(plan: StepPlan, result: StepResult) -> StepResult:
        raise EngineUnavailableError("lost")

    bench = Bench()
    run(bench, make_request("a", 22, 8, family=0))
    bench.ring.sabotage = fail
    bench.submit(make_request("b", 5, 4))
    bench.step()
    assert bench.coordinator.snapshot().num_idle_pages == 0
    run_after = make_request("c", 22, 8, family=0)
    bench.submit(run_after)
    bench.run_until_idle()
    bench.check_finished("c")
    assert cached(bench, "c") == 0
