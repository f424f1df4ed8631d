"""Every record survives its codec, whatever it holds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_wire import codec
from dflash_wire.processors import DraftBias, Processors, RowExtras, SlotStart, TokenLogprobs
from dflash_wire.records import (
    CycleStats,
    DraftResult,
    GenerationRequest,
    GenerationStats,
    Ingest,
    Row,
    StepPlan,
    StepResult,
    TokenChunk,
)
from dflash_wire.sampling import SamplingParams
from dflash_wire.trees import LEAST_SCORE, NodeBudget, TreeOutcome, packed_scores, unpacked_scores

pytestmark = pytest.mark.unit

counts = st.integers(0, 2**40)
ids = st.lists(st.integers(0, 2**31 - 1), max_size=5)
times = st.floats(0, 1e9)
texts = st.text(max_size=12)
errors = st.none() | st.fixed_dictionaries(
    {"code": texts, "message": texts, "param": st.none() | texts}
)
sampling = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1),
    top_k=counts,
    seed=st.integers(0, 2**63 - 1),
    min_p=st.floats(0, 1),
    rejects=st.booleans(),
)
numbers = st.floats(allow_nan=False)
processors = st.builds(
    Processors,
    repetition_penalty=numbers,
    presence_penalty=numbers,
    frequency_penalty=numbers,
    biased_token_ids=ids,
    biases=st.lists(numbers, max_size=3),
    bad_words=st.lists(ids, max_size=3),
    allowed_token_ids=ids,
    min_tokens=counts,
    end_token_ids=ids,
    grammar=st.text(max_size=20),
)
extras = st.builds(
    RowExtras,
    num_logprobs=st.none() | counts,
    slot=st.none() | counts,
    start=st.none() | st.builds(SlotStart, processors, counts, ids),
    num_prompt_logprobs=st.none() | counts,
    next_token_id=st.none() | counts,
    draft_bias=st.none() | st.builds(DraftBias, ids, st.lists(numbers, max_size=3), ids),
)
logprobs = st.lists(
    st.builds(TokenLogprobs, numbers, ids, st.lists(numbers, max_size=3)), max_size=3
)
rows = st.builds(
    Row,
    seq_id=counts,
    token_ids=ids,
    start_position=counts,
    page_ids=ids,
    width=counts,
    is_prefill=st.booleans(),
    samples=st.booleans(),
    sampling=sampling,
    drafter=counts,
    draft_width=counts,
    is_tree=st.booleans(),
    extras=st.none() | extras,
)
ingests = st.builds(
    Ingest,
    feature_offset=counts,
    num_tokens=counts,
    start_position=counts,
    page_ids=ids,
    drafter=counts,
    stride=counts,
    token_ids=st.none() | ids,
)
budgets = st.builds(
    NodeBudget,
    sharing=st.lists(st.integers(-1, 3), max_size=3),
    num_nodes=ids,
    step_ms=st.lists(times, max_size=3),
    acceptance=st.lists(st.lists(st.floats(0, 1), max_size=3), max_size=2),
)
plans = st.builds(
    StepPlan,
    step_id=counts,
    rows=st.lists(rows, max_size=3),
    ingests=st.lists(ingests, max_size=3),
    feature_base=counts,
    num_cohorts=counts,
    node_budget=st.none() | budgets,
)
drafts = st.builds(
    DraftResult,
    step_id=counts,
    draft_token_ids=st.lists(ids, max_size=3),
    draft_ms=times,
    parents=st.none() | st.lists(ids, max_size=3),
    began_s=times,
    scores=st.none() | st.lists(st.binary(max_size=6), max_size=3),
    proposals=st.none() | st.lists(st.binary(max_size=6), max_size=3),
)
trees = st.builds(
    TreeOutcome,
    num_nodes=counts,
    accepted_nodes=ids,
    scores=st.binary(max_size=6),
    chain_trials=counts,
    chain_hits=counts,
)
results = st.builds(
    StepResult,
    step_id=counts,
    committed_token_ids=st.lists(ids, max_size=3),
    draft_ms=times,
    verify_ms=times,
    error=errors,
    draft_began_s=times,
    verify_began_s=times,
    trees=st.none() | st.lists(st.none() | trees, max_size=3),
    logprobs=st.none() | st.lists(st.none() | logprobs, max_size=3),
    prompt_logprobs=st.none() | st.lists(st.none() | logprobs, max_size=3),
    num_drafted=st.none() | ids,
)
cycles = st.builds(
    CycleStats,
    num_draft_tokens=counts,
    num_accepted_drafts=counts,
    num_committed=counts,
    draft_ms=times,
    verify_ms=times,
    overhead_ms=times,
)
chunks = st.builds(
    TokenChunk,
    request_id=texts,
    token_ids=ids,
    finish_reason=st.none() | texts,
    cycle=st.none() | cycles,
    error=errors,
    num_cached_tokens=st.none() | counts,
    num_before=counts,
    policy=st.none() | texts,
    logprobs=st.none() | logprobs,
    prompt_logprobs=st.none() | logprobs,
)
requests = st.builds(
    GenerationRequest,
    request_id=texts,
    prompt_token_ids=ids,
    max_tokens=counts,
    sampling=sampling,
    stop_token_ids=ids,
    policy=st.none() | texts,
    frame_address=texts,
    cache_salt=texts,
    priority=st.integers(-(2**31), 2**31 - 1),
    drafter=st.none() | texts,
    processors=st.none() | processors,
    num_logprobs=st.none() | counts,
    num_prompt_logprobs=st.none() | counts,
)
few = settings(max_examples=40, deadline=None)


@few
@given(plans)
def test_plan(plan: StepPlan) -> None:
    assert codec.decode_plan(codec.encode_plan(plan)) == plan


@few
@given(drafts)
def test_drafts(result: DraftResult) -> None:
    assert codec.decode_drafts(codec.encode_drafts(result)) == result


@few
@given(results)
def test_result(result: StepResult) -> None:
    assert codec.decode_result(codec.encode_result(result)) == result


@few
@given(st.lists(chunks, max_size=3))
def test_chunks(values: list[TokenChunk]) -> None:
    assert codec.decode_chunks(codec.encode_chunks(values)) == values


@few
@given(requests)
def test_request(request: GenerationRequest) -> None:
    assert codec.decode_request(codec.encode_request(request)) == request


@given(st.recursive(st.none() | st.booleans() | counts | times | texts, st.lists, max_leaves=8))
def test_plain_values(value: object) -> None:
    assert codec.unpack(codec.pack({"value": value})) == {"value": value}


def test_frames_are_compact() -> None:
    """Positional arrays: no field names on the wire."""
    plan = StepPlan(1, [Row(1, [5], 9, [0, 1], width=8)], [Ingest(0, 3, 6, [0, 1])])
    frame = codec.encode_plan(plan)
    assert b"token_ids" not in frame
    assert len(frame) < 60


def test_trees_cost_steps_without_them_nothing() -> None:
    drafts, result = DraftResult(1, [[5, 6], []]), StepResult(1, [[5], [6]])
    num_drafts = len(codec.encode_drafts(drafts))
    num_result = len(codec.encode_result(result))
    drafts.add_tree(1, [7, 8], [0, 0], b"1234")
    result.trees = [None, TreeOutcome(2, [1], b"1234")]
    assert len(codec.encode_drafts(drafts)) == num_drafts + 2 + (4 - 1) + (3 + 2 + 5)
    assert len(codec.encode_result(result)) == num_result + (1 + 1 + 1 + 1 + 2 + 6 + 2)
    chain, tree = (Row(1, [5], 9, [0], width=8, is_tree=is_tree) for is_tree in (False, True))
    sizes = {len(codec.encode_plan(StepPlan(1, [row]))) for row in (chain, tree)}
    assert len(sizes) == 1


def test_processors_and_logprobs_cost_rows_without_them_nothing() -> None:
    """Positional arrays end where nothing more is asked for."""
    plain = Row(1, [5], 9, [0], width=8)
    asking = replace(plain, extras=RowExtras(None, 3))
    sizes = [len(codec.encode_plan(StepPlan(1, [row]))) for row in (plain, asking)]
    assert sizes[1] == sizes[0] + 1 + 2
    assert len(codec.unpack(codec.encode_plan(StepPlan(1, [plain])))[3][0]) == 9
    cold, warm = SamplingParams(), SamplingParams(min_p=0.5)
    sizes = [
        len(codec.encode_plan(StepPlan(1, [replace(plain, sampling=s)]))) for s in (cold, warm)
    ]
    assert sizes[1] == sizes[0] + 9
    result = StepResult(1, [[5], [6]])
    num_result = len(codec.encode_result(result))
    result.logprobs = [None, [TokenLogprobs(-0.5, [], [])]]
    assert len(codec.encode_result(result)) == num_result + 1 + 1 + 1 + 1 + (1 + 9 + 1 + 1)
    request = GenerationRequest("r", [5], 3)
    assert len(codec.unpack(codec.encode_request(request))) == 10
    assert len(codec.unpack(codec.encode_request(replace(request, num_logprobs=0)))) == 13


def test_tokens_and_short_chains_cost_other_drafters_nothing() -> None:
    plain = Ingest(3, 2, 7, [0])
    told = replace(plain, token_ids=[5, 6])
    sizes = [len(codec.encode_plan(StepPlan(1, [], [ingest]))) for ingest in (plain, told)]
    assert sizes[1] == sizes[0] + 1 + 2
    assert len(codec.unpack(codec.encode_plan(StepPlan(1, [], [plain])))[4][0]) == 6
    result = StepResult(1, [[5], [6]])
    assert len(codec.unpack(codec.encode_result(result))) == 7
    result.num_drafted = [0, 3]
    assert codec.decode_result(codec.encode_result(result)) == result


def test_scores_are_packed_in_16_bits() -> None:
    scores = [-0.0625, -1.5, -1234.0, -math.inf]
    packed = packed_scores(scores)
    assert len(packed) == 8
    assert unpacked_scores(packed) == (-0.0625, -1.5, -1234.0, LEAST_SCORE)
    assert unpacked_scores(packed_scores([])) == ()


def test_two_drafters_trees_and_chains_are_merged() -> None:
    plan = StepPlan(4, [Row(i, [5], 9, [i], width=3) for i in range(4)])
    first, second = DraftResult.nothing(plan), DraftResult.nothing(plan)
    first.draft_token_ids[0] = [1, 2]
    first.add_tree(1, [3, 4], [0, 0], b"ab")
    second.draft_token_ids[3] = [9, 9]
    both = (first.merged(second), second.merged(first))
    for merged in both:
        assert merged.draft_token_ids == [[1, 2], [3, 4], [], [9, 9]]
        assert (merged.parents, merged.scores) == ([[], [0, 0], [], []], [b"", b"ab", b"", b""])
    second.add_tree(2, [8], [0], b"c")
    merged = second.merged(first)
    assert merged.parents == [[], [0, 0], [0], []]
    assert merged.scores == [b"", b"ab", b"c", b""]
    assert DraftResult.nothing(plan).merged(DraftResult.nothing(plan)).parents is None


def test_derived_values() -> None:
    prefill = Row(1, [5, 6, 7], 0, [0], is_prefill=True)
    verify = Row(2, [5], 9, [0, 1], width=8)
    assert [row.num_positions for row in (prefill, verify)] == [3, 8]
    assert [row.most_kept for row in (prefill, verify)] == [3, 8]
    shallow = Row(3, [5], 9, [0, 1], width=32, draft_width=16, is_tree=True)
    small = Row(3, [5], 9, [0, 1], width=4, draft_width=16, is_tree=True)
    derived = [(row.num_positions, row.drafted_width, row.most_kept) for row in (shallow, small)]
    assert derived == [(32, 16, 16), (4, 16, 4)]
    assert StepPlan(1, [prefill, verify]).num_positions == 11
    assert GenerationStats().acceptance_length == 0.0
    assert GenerationStats(num_cycles=2, committed_per_cycle=[1, 4]).acceptance_length == 2.5


def test_cycles_add_up() -> None:
    stats = GenerationStats()
    stats.add(CycleStats(7, 3, 4, 1.0, 2.0, 0.5))
    stats.add(CycleStats(3, 0, 1, 0.5, 1.5, 0.25))
    assert stats == GenerationStats(2, 10, 3, [4, 1], 1.5, 3.5, 0.75)


def test_clipped_cycle_keeps_its_cost() -> None:
    cycle = CycleStats(7, 3, 4, 1.0, 2.0, 0.5)
    assert [cycle.clipped(n) for n in (5, 4)] == [cycle, cycle]
    assert cycle.clipped(3) == CycleStats(7, 3, 3, 1.0, 2.0, 0.5)
    assert cycle.clipped(1) == CycleStats(7, 1, 1, 1.0, 2.0, 0.5)


@given(st.integers(-(2**40), 2**40), st.lists(ids, max_size=4))
def test_kept_tokens(step_id: int, kept: list[list[int]]) -> None:
    assert codec.decode_kept(codec.encode_kept(step_id, kept)) == (step_id, kept)
