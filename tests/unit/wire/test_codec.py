"""Every record survives its codec, whatever it holds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_wire import codec
from dflash_wire.records import (
    CycleStats,
    DraftResult,
    GenerationRequest,
    GenerationStats,
    Ingest,
    Row,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenChunk,
)

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
)
ingests = st.builds(
    Ingest, feature_offset=counts, num_tokens=counts, start_position=counts, page_ids=ids
)
plans = st.builds(
    StepPlan,
    step_id=counts,
    rows=st.lists(rows, max_size=3),
    ingests=st.lists(ingests, max_size=3),
    feature_base=counts,
)
drafts = st.builds(
    DraftResult,
    step_id=counts,
    draft_token_ids=st.lists(ids, max_size=3),
    draft_ms=times,
    parents=st.none() | st.lists(ids, max_size=3),
)
results = st.builds(
    StepResult,
    step_id=counts,
    committed_token_ids=st.lists(ids, max_size=3),
    draft_ms=times,
    verify_ms=times,
    error=errors,
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


def test_derived_values() -> None:
    prefill = Row(1, [5, 6, 7], 0, [0], is_prefill=True)
    verify = Row(2, [5], 9, [0, 1], width=8)
    assert [row.num_positions for row in (prefill, verify)] == [3, 8]
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
