"""Master property: output equals plain decoding, whatever drafts, widths, chunks, preemptions."""

from __future__ import annotations

import math

import pytest
from coordinator_fakes import Bench, make_limits, make_request
from fake_trees import fake_tree
from toy_target import DRAFTERS, plain_generation

ROOMY = make_limits()
CHUNKED = make_limits(max_step_positions=17, max_rows=4)
TINY = make_limits(num_pages=13, page_size=4, max_step_positions=24, max_context=52)
ENGINES = {"roomy": ROOMY, "chunked": CHUNKED, "tiny": TINY}
CHAINS = ["off", "static:2", "static:4", "static:8", "static:16"]
# A step of the smallest engine below holds 17 positions.
POLICIES = [*CHAINS, "static-tree:2", "static-tree:6", "static-tree:17"]
# (prompt length, max_tokens): one-token prompts and outputs, long ones, page and width multiples.
SHAPES = [(5, 20), (1, 1), (23, 9), (16, 16), (2, 33), (31, 2), (40, 11), (8, 17)]
# Short prompts that grow: more start than can end together.
GROWING_SHAPES = [(3, 45), (2, 50), (5, 40), (1, 1), (4, 48), (16, 30), (2, 33), (40, 11)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("num_requests", [1, 8])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_output_equals_plain_generation(
    drafter: str, policy: str, num_requests: int, engine: str
) -> None:
    bench = Bench(ENGINES[engine], DRAFTERS[drafter], policy)
    shapes = GROWING_SHAPES if engine == "tiny" else SHAPES
    for i in range(num_requests):
        bench.submit(make_request(f"r{i}", *shapes[i], seed=i))
    bench.run_until_idle()
    bench.check_all_finished()
    for i in range(num_requests):
        chunks = bench.sink.chunks[f"r{i}"]
        num_prefill_tokens = sum(len(chunk.token_ids) for chunk in chunks if chunk.cycle is None)
        stats = bench.sink.stats(f"r{i}")
        assert num_prefill_tokens >= 1
        assert sum(stats.committed_per_cycle) + num_prefill_tokens == len(
            bench.sink.tokens(f"r{i}")
        )
        assert stats.num_accepted_drafts <= stats.num_draft_tokens
    if engine == "tiny" and num_requests == 8:
        assert bench.coordinator.snapshot().num_preemptions > 0


@pytest.mark.parametrize("policy", CHAINS)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 16, 17, 18, 33, 50])
def test_cycle_counts(policy: str, num_tokens: int) -> None:
    width = 1 if policy == "off" else int(policy.split(":")[1])
    expected = {
        "always_right": math.ceil((num_tokens - 1) / width),
        "always_wrong": num_tokens - 1,
    }
    for drafter, num_cycles in expected.items():
        bench = Bench(drafter=DRAFTERS[drafter], policy=policy)
        bench.submit(make_request("r", 6, num_tokens))
        bench.run_until_idle()
        bench.check_all_finished()
        stats = bench.sink.stats("r")
        assert stats.num_cycles == num_cycles
        assert sum(stats.committed_per_cycle) == num_tokens - 1
        if drafter == "always_wrong":
            assert stats.num_accepted_drafts == 0


def test_widths_near_the_end_follow_the_reference_loop() -> None:
    # After the prefill token 6 remain: width 4 commits 4; 2 remain: width 3 commits 2 of its 3.
    bench = Bench(drafter=DRAFTERS["always_right"], policy="static:4")
    bench.submit(make_request("r", 3, 7))
    bench.run_until_idle()
    widths = [row.width for plan in bench.ring.plans for row in plan.rows if not row.is_prefill]
    stats = bench.sink.stats("r")
    assert widths == [4, 3]
    assert stats.committed_per_cycle == [4, 2]
    assert (stats.num_draft_tokens, stats.num_accepted_drafts) == (5, 5)


def test_single_remaining_token_is_decoded_plainly() -> None:
    bench = Bench(drafter=DRAFTERS["always_right"], policy="static:4")
    bench.submit(make_request("r", 3, 6))
    bench.run_until_idle()
    widths = [row.width for plan in bench.ring.plans for row in plan.rows if not row.is_prefill]
    assert widths == [4, 1]


@pytest.mark.parametrize(
    ("num_tokens", "shapes"),
    [
        # After the prefill 22 remain: 16 are committed at once, then 6 with a block one deeper than that.
        (23, [(40, 16, True), (40, 7, True)]),
        (18, [(40, 16, True), (1, 1, False)]),
        (3, [(40, 3, True)]),
        (2, [(1, 1, False)]),
    ],
)
def test_what_remains_limits_how_deep_a_tree_is(
    num_tokens: int, shapes: list[tuple[int, int, bool]]
) -> None:
    # No room behind the last token: pages of exactly the sequence's length must do.
    limits = make_limits(num_pages=9 + num_tokens, page_size=1)
    bench = Bench(limits, DRAFTERS["always_right"], "static-tree:40")
    bench.submit(make_request("r", 9, num_tokens))
    bench.run_until_idle()
    bench.check_all_finished()
    rows = [row for plan in bench.ring.plans for row in plan.rows if not row.is_prefill]
    assert [(row.width, row.drafted_width, row.is_tree) for row in rows] == shapes
    assert bench.coordinator.snapshot().num_preemptions == 0


def test_tree_cycles_count_the_nodes_that_were_verified() -> None:
    bench = Bench(drafter=DRAFTERS["half_right"], policy="static-tree:24")
    bench.submit(make_request("r", 5, 60))
    bench.run_until_idle()
    stats = bench.sink.stats("r")
    totals = bench.coordinator.snapshot().totals
    rows = [row for plan in bench.ring.plans for row in plan.rows if row.is_tree]
    num_nodes = sum(fake_tree(row, 0, row.width - 1).num_nodes for row in rows)
    assert stats.num_draft_tokens == totals.num_draft_tokens == num_nodes
    assert num_nodes < 23 * len(rows), "none came back smaller than planned"
    assert totals.accepted_drafts_by_position[0] == len(rows)
    assert sum(totals.accepted_drafts_by_position) == stats.num_accepted_drafts


def test_pages_are_taken_for_a_path_and_not_for_a_tree() -> None:
    bench = Bench(make_limits(page_size=4), DRAFTERS["always_wrong"], "static-tree:64")
    bench.submit(make_request("r", 5, 100))
    bench.run_until_idle()
    rows = [row for plan in bench.ring.plans for row in plan.rows if row.drafted_width == 16]
    assert len(rows) > 50 and all(row.width == 64 for row in rows)
    assert {len(row.page_ids) - -(-(row.start_position + 16) // 4) for row in rows} == {0}


@pytest.mark.parametrize("policy", ["static:8", "static-tree:12", "static-tree:64"])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("stop_index", range(12))
def test_stop_token_anywhere_in_a_draft_block(drafter: str, stop_index: int, policy: str) -> None:
    free_run, _ = plain_generation(make_request("r", 7, 30), 256)
    stop = free_run[stop_index]
    bench = Bench(drafter=DRAFTERS[drafter], policy=policy)
    bench.submit(make_request("r", 7, 30, stop=[stop]))
    bench.run_until_idle()
    bench.check_all_finished()
    assert bench.sink.last("r").finish_reason == "stop"
    assert bench.sink.tokens("r") == free_run[: free_run.index(stop) + 1]


def test_stop_token_at_the_length_limit_counts_as_stop() -> None:
    free_run, _ = plain_generation(make_request("r", 7, 9), 256)
    assert free_run.index(free_run[8]) == 8
    bench = Bench(policy="static:8")
    bench.submit(make_request("r", 7, 9, stop=[free_run[8]]))
    bench.run_until_idle()
    assert bench.sink.last("r").finish_reason == "stop"


def test_stop_token_behind_the_length_limit_is_not_seen() -> None:
    free_run, _ = plain_generation(make_request("r", 7, 9), 256)
    bench = Bench(policy="static:16")
    bench.submit(make_request("r", 7, 4, stop=[free_run[5]]))
    bench.run_until_idle()
    assert bench.sink.tokens("r") == free_run[:4]
    assert bench.sink.last("r").finish_reason == "length"


def test_max_context_ends_a_sequence() -> None:
    bench = Bench(make_limits(max_context=32), policy="static:16")
    bench.submit(make_request("r", 20, 1000))
    bench.submit(make_request("full", 31, 1000))
    bench.run_until_idle()
    bench.check_all_finished()
    assert len(bench.sink.tokens("r")) == 12
    assert len(bench.sink.tokens("full")) == 1


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_joins_and_leaves_between_steps(drafter: str, engine: str) -> None:
    bench = Bench(ENGINES[engine], DRAFTERS[drafter], "static:8")
    cancelled = {"r3", "r5"}
    for i in range(12):
        bench.submit(make_request(f"r{i}", *SHAPES[i % 8], seed=i, policy=POLICIES[i % 8]))
        bench.step()
        bench.step()
        if f"r{i}" in cancelled and not bench.sink.has_ended(f"r{i}"):
            bench.coordinator.cancel(f"r{i}")
            del bench.requests[f"r{i}"]
    bench.run_until_idle()
    bench.check_all_finished()
