"""msgpack form of the records: positional arrays, so a step's frame is small and quick to build."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgpack

from dflash_wire.processors import DraftBias, Processors, RowExtras, SlotStart, TokenLogprobs
from dflash_wire.records import (
    CycleStats,
    DraftResult,
    GenerationRequest,
    Ingest,
    Row,
    StepPlan,
    StepResult,
    TokenChunk,
)
from dflash_wire.sampling import SamplingParams
from dflash_wire.trees import NodeBudget, TreeOutcome

PREFILL, SAMPLES, TREE = 1, 2, 4
"""Bits of a row's kind."""
START, DRAFT_BIAS = map(RowExtras._fields.index, ("start", "draft_bias"))
"""Places of what is more than a number, the second of them the last."""


def pack(value: Any) -> bytes:
    """Encode plain lists, dicts, strings and numbers."""
    frame: bytes = msgpack.packb(value)
    return frame


def unpack(frame: bytes) -> Any:
    """Decode ``pack``; map keys stay strings."""
    return msgpack.unpackb(frame)


def _sampling(s: SamplingParams) -> tuple[float, ...]:
    fields = (s.temperature, s.top_p, s.top_k, s.seed)
    if s.rejects:
        return (*fields, s.min_p, s.rejects)
    return (*fields, s.min_p) if s.min_p else fields


def _processors(p: Processors) -> tuple[Any, ...]:
    return tuple(getattr(p, name) for name in Processors.__slots__)


def _packed_extras(extras: RowExtras) -> list[Any]:
    fields: list[Any] = list(extras)
    if extras.start is not None:
        processors, *rest = extras.start
        fields[START] = (_processors(processors), *rest)
    while fields and fields[-1] is None:
        fields.pop()
    return fields


def _extras(fields: list[Any]) -> RowExtras:
    if len(fields) > START and fields[START] is not None:
        processors, *rest = fields[START]
        fields[START] = SlotStart(Processors(*processors), *rest)
    if len(fields) > DRAFT_BIAS:
        fields[DRAFT_BIAS] = DraftBias._make(fields[DRAFT_BIAS])
    return RowExtras(*fields)


def _row(
    seq_id: int,
    token_ids: list[int],
    start_position: int,
    page_ids: list[int],
    width: int,
    kind: int,
    sampling: tuple[float, float, int, int],
    drafter: int,
    draft_width: int,
    extras: list[Any] | None = None,
) -> Row:
    params = SamplingParams(*sampling)
    return Row(
        seq_id,
        token_ids,
        start_position,
        page_ids,
        width,
        bool(kind & PREFILL),
        bool(kind & SAMPLES),
        params,
        drafter,
        draft_width,
        bool(kind & TREE),
        None if extras is None else _extras(extras),
    )


def encode_plan(plan: StepPlan) -> bytes:
    """Encode a ``StepPlan``."""
    rows: list[tuple[Any, ...]] = [
        (
            r.seq_id,
            r.token_ids,
            r.start_position,
            r.page_ids,
            r.width,
            r.is_prefill + SAMPLES * r.samples + TREE * r.is_tree,
            _sampling(r.sampling),
            r.drafter,
            r.draft_width,
        )
        for r in plan.rows
    ]
    for i, row in enumerate(plan.rows):
        if row.extras is not None:
            rows[i] = (*rows[i], _packed_extras(row.extras))
    ingests: list[tuple[Any, ...]] = [
        (i.feature_offset, i.num_tokens, i.start_position, i.page_ids, i.drafter, i.stride)
        for i in plan.ingests
    ]
    for n, ingest in enumerate(plan.ingests):
        if ingest.token_ids is not None:
            ingests[n] = (*ingests[n], ingest.token_ids)
    fields = (plan.step_id, plan.feature_base, plan.num_cohorts, rows, ingests)
    return pack(fields if plan.node_budget is None else (*fields, plan.node_budget))


def decode_plan(frame: bytes) -> StepPlan:
    """Decode ``encode_plan``."""
    step_id, feature_base, num_cohorts, rows, ingests, *budget = unpack(frame)
    return StepPlan(
        step_id,
        [_row(*fields) for fields in rows],
        [Ingest(*fields) for fields in ingests],
        feature_base,
        num_cohorts,
        NodeBudget._make(budget[0]) if budget else None,
    )


def encode_drafts(result: DraftResult) -> bytes:
    """Encode a ``DraftResult``."""
    fields: tuple[Any, ...] = (
        result.step_id,
        result.draft_token_ids,
        result.draft_ms,
        result.parents,
        result.began_s,
    )
    if result.proposals is not None:
        return pack((*fields, result.scores, result.proposals))
    return pack(fields if result.scores is None else (*fields, result.scores))


def decode_drafts(frame: bytes) -> DraftResult:
    """Decode ``encode_drafts``."""
    return DraftResult(*unpack(frame))


def encode_result(result: StepResult) -> bytes:
    """Encode a ``StepResult``."""
    fields: tuple[Any, ...] = (
        result.step_id,
        result.committed_token_ids,
        result.draft_ms,
        result.verify_ms,
        result.error,
        result.draft_began_s,
        result.verify_began_s,
    )
    told = (result.trees, result.logprobs, result.prompt_logprobs)
    if result.num_drafted is not None:
        return pack((*fields, *told, result.num_drafted))
    if result.prompt_logprobs is not None:
        return pack((*fields, *told))
    if result.logprobs is not None:
        return pack((*fields, result.trees, result.logprobs))
    return pack(fields if result.trees is None else (*fields, result.trees))


def decode_result(frame: bytes) -> StepResult:
    """Decode ``encode_result``."""
    result = StepResult(*unpack(frame))
    if result.trees is not None:
        result.trees = [None if tree is None else TreeOutcome._make(tree) for tree in result.trees]
    if result.logprobs is not None:
        result.logprobs = _row_logprobs(result.logprobs)
    if result.prompt_logprobs is not None:
        result.prompt_logprobs = _row_logprobs(result.prompt_logprobs)
    return result


def _row_logprobs(rows: Sequence[Sequence[Any] | None]) -> list[list[TokenLogprobs] | None]:
    return list(map(_maybe_logprobs, rows))


def _maybe_logprobs(tokens: Sequence[Sequence[Any]] | None) -> list[TokenLogprobs] | None:
    return None if tokens is None else [TokenLogprobs._make(token) for token in tokens]


def encode_chunks(chunks: list[TokenChunk]) -> bytes:
    """Encode one step's chunks for one gateway."""
    packed: list[tuple[Any, ...]] = [
        (
            c.request_id,
            c.token_ids,
            c.finish_reason,
            c.cycle,
            c.error,
            c.num_cached_tokens,
            c.num_before,
            c.policy,
        )
        for c in chunks
    ]
    for i, chunk in enumerate(chunks):
        if chunk.prompt_logprobs is not None:
            packed[i] = (*packed[i], chunk.logprobs, chunk.prompt_logprobs)
        elif chunk.logprobs is not None:
            packed[i] = (*packed[i], chunk.logprobs)
    return pack(packed)


def decode_chunks(frame: bytes) -> list[TokenChunk]:
    """Decode ``encode_chunks``."""
    return [
        TokenChunk(
            rid,
            ids,
            reason,
            None if cycle is None else CycleStats._make(cycle),
            error,
            num_cached,
            num_before,
            policy,
            *map(_maybe_logprobs, logprobs),
        )
        for rid, ids, reason, cycle, error, num_cached, num_before, policy, *logprobs in unpack(
            frame
        )
    ]


def encode_request(request: GenerationRequest) -> bytes:
    """Encode a ``GenerationRequest``."""
    fields: tuple[Any, ...] = (
        request.request_id,
        request.prompt_token_ids,
        request.max_tokens,
        _sampling(request.sampling),
        request.stop_token_ids,
        request.policy,
        request.frame_address,
        request.cache_salt,
        request.priority,
        request.drafter,
    )
    processors = request.processors
    asked = (request.num_logprobs, request.num_prompt_logprobs)
    if processors is not None or asked != (None, None):
        packed = None if processors is None else _processors(processors)
        fields = (*fields, packed, *asked)
    return pack(fields)


def decode_request(frame: bytes) -> GenerationRequest:
    """Decode ``encode_request``."""
    rid, prompt, max_tokens, sampling, *rest = unpack(frame)
    request = GenerationRequest(rid, prompt, max_tokens, SamplingParams(*sampling), *rest)
    if request.processors is None:
        return request
    return replace(request, processors=Processors(*rest[-3]))


def encode_kept(step_id: int, kept: list[list[int]]) -> bytes:
    """Encode which packed tokens of a step's rows stay."""
    return pack((step_id, kept))


def decode_kept(frame: bytes) -> tuple[int, list[list[int]]]:
    """Decode ``encode_kept``."""
    step_id, kept = unpack(frame)
    return step_id, kept
