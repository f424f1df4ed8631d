"""From engine chunks to text pieces: the one path every response is built from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import NamedTuple

from dflash_wire.errors import (
    EngineUnavailableError,
    OverloadedError,
    RequestCancelledError,
    error_from_wire,
)
from dflash_wire.records import GenerationStats, TokenChunk
from gateway.details import PieceDetail, TokenEntry
from gateway.detokenize import SequenceText
from gateway.metrics import GatewayMetrics, SequenceMeter
from gateway.parsed_text import ParsedText
from gateway.state import GatewayState
from gateway.validation import SequencePlan, drafter_label

FIRST_DELAY_S, LONGEST_DELAY_S = 0.05, 1.0
"""Before a refused sequence of an answer that has begun asks again; twice as long each time."""
MOST_PATIENCE_S = 60.0
"""Then it is refused after all."""


class TextPiece(NamedTuple):  # a tuple, because every chunk makes one
    """What one committed chunk adds to one choice."""

    choice_index: int
    text: str
    num_tokens: int
    """Output tokens of the sequence up to here, those without text included."""
    finish_reason: str | None = None
    """Set on the sequence's last piece only."""
    stats: GenerationStats | None = None
    """Set on the sequence's last piece only."""
    detail: PieceDetail | None = None
    """Set if the request asks for more than text."""


TextPieces = AsyncGenerator[TextPiece, None]


async def sequence_pieces(
    state: GatewayState, plan: SequencePlan, metrics: GatewayMetrics, arrived: float
) -> TextPieces:
    """Generate one sequence; the last piece has a finish reason.

    The engine's iterator is closed before the last piece goes out, and whenever this generator is
    closed or cancelled, so a sequence never outlives the interest in it.

    Raises:
        DFlashError: the engine refused the request or failed.
    """
    text = _new_text(state, plan)
    advance = _advance_in_detail if plan.is_detailed else _advance
    stats, recorder = GenerationStats(), state.recorder
    meter = metrics.start_sequence(arrived, len(plan.request.prompt_token_ids), plan.drafter)
    last: TextPiece | None = None
    chunks: AsyncIterator[TokenChunk] | None = None
    try:
        chunks = state.engine.generate(plan.request)
        async for chunk in chunks:
            taken_s = 0.0 if recorder is None else recorder.clock()
            piece = advance(plan, text, stats, meter, chunk)
            if piece.finish_reason is not None:
                last = piece
                break
            if piece.text or piece.detail is not None:
                yield piece
            if recorder is not None:
                recorder.add(plan.request.request_id, len(chunk.token_ids), taken_s)
            if chunk.error is not None:
                raise error_from_wire(chunk.error)
    except RequestCancelledError as error:
        # Nobody here cancelled it: for the client this is a failure that may pass.
        raise EngineUnavailableError("The engine dropped the request; send it again.") from error
    finally:
        meter.finish()
        await close_chunks(chunks)
    if last is None:
        raise EngineUnavailableError("The engine ended the stream too early; send it again.")
    yield last


def _new_text(state: GatewayState, plan: SequencePlan) -> SequenceText | ParsedText:
    parse = plan.parse
    text = SequenceText(
        state.tokenizer.new_detokenizer(frozenset() if parse is None else parse.markers),
        plan.stop_strings,
        plan.request.stop_token_ids,
        plan.includes_stop,
        plan.min_tokens,
    )
    return text if parse is None else ParsedText(text, parse.new_parser())


def _advance(
    plan: SequencePlan,
    text: SequenceText | ParsedText,
    stats: GenerationStats,
    meter: SequenceMeter,
    chunk: TokenChunk,
) -> TextPiece:
    """Take in a chunk, or its beginning when the sequence ends inside. Mutates ``text``, ``stats`` and
    ``meter``."""
    tokens_before = text.num_tokens
    new_text = text.push(chunk.token_ids)
    if chunk.finish_reason is not None:
        new_text += text.finish(chunk.finish_reason)
    num_new_tokens = text.num_tokens - tokens_before
    if chunk.num_cached_tokens:
        stats.num_cached_tokens = chunk.num_cached_tokens
        meter.add_cached(chunk.num_cached_tokens)
    if chunk.policy is not None:
        stats.policy = chunk.policy
        meter.set_drafter(drafter_label(chunk.policy, plan.request.drafter))
    cycle = chunk.cycle
    if cycle is not None:
        if num_new_tokens < cycle.num_committed:
            cycle = cycle.clipped(num_new_tokens)
        stats.add(cycle)
    meter.add_chunk(num_new_tokens, cycle)
    if text.finish_reason is None:
        return TextPiece(plan.index, new_text, text.num_tokens)
    return TextPiece(plan.index, new_text, text.num_tokens, text.finish_reason, stats)


def _advance_in_detail(
    plan: SequencePlan,
    text: SequenceText | ParsedText,
    stats: GenerationStats,
    meter: SequenceMeter,
    chunk: TokenChunk,
) -> TextPiece:
    """As ``_advance``, for plans that ask for more than text; parsed text is in the detail alone."""
    num_before = text.num_tokens
    piece = _advance(plan, text, stats, meter, chunk)
    token_ids = chunk.token_ids[: piece.num_tokens - num_before]
    entries = [TokenEntry(*pair) for pair in zip(token_ids, chunk.logprobs or (), strict=False)]
    detail = PieceDetail(
        token_ids if plan.returns_token_ids else (),
        entries,
        chunk.prompt_logprobs if plan.tells_prompt_logprobs else None,
    )
    if num_before == 0 and plan.echo is not None:
        piece = piece._replace(text=plan.echo + piece.text)
        if chunk.prompt_logprobs is not None and plan.request.num_logprobs is not None:
            about_prompt = [None, *chunk.prompt_logprobs]
            prompt = zip(plan.request.prompt_token_ids, about_prompt, strict=True)
            detail = detail._replace(logprobs=[*(TokenEntry(*pair) for pair in prompt), *entries])
    if isinstance(text, ParsedText):
        deltas = text.take_deltas()
        detail = detail._replace(deltas=deltas, num_reasoning_tokens=text.num_reasoning_tokens)
        piece = piece._replace(text="")
    return piece._replace(detail=detail) if detail.has_news or piece.finish_reason else piece


async def close_chunks(chunks: AsyncIterator[TokenChunk] | None) -> None:
    """Close an engine's iterator, which cancels the request if it still runs."""
    aclose = getattr(chunks, "aclose", None)
    if aclose is not None:
        await aclose()


def request_pieces(
    state: GatewayState, plans: Sequence[SequencePlan], metrics: GatewayMetrics, arrived: float
) -> TextPieces:
    """Generate all sequences of a request at the same time, pieces in order of arrival."""
    makers = [partial(sequence_pieces, state, plan, metrics, arrived) for plan in plans]
    if len(makers) == 1:
        return makers[0]()
    has_begun = asyncio.Event()
    return merge([patient_pieces(make, has_begun) for make in makers])


async def patient_pieces(make: Callable[[], TextPieces], has_begun: asyncio.Event) -> TextPieces:
    """One of several sequences: refused when the answer has begun, it asks again until there is room.

    A stream's status is out by then, and what its other sequences have generated would be lost.

    Args:
        make: begins the sequence.
        has_begun: set when any sequence of the request has a piece. Mutated.

    Raises:
        OverloadedError: refused before the answer has begun, or for too long: the client may send all of
            it again.
    """
    delay_s, waited_s = FIRST_DELAY_S, 0.0
    while True:
        num_pieces = 0
        try:
            async with aclosing(make()) as pieces:
                async for piece in pieces:
                    num_pieces += 1
                    has_begun.set()
                    yield piece
            return
        except OverloadedError:
            if num_pieces or not has_begun.is_set() or waited_s >= MOST_PATIENCE_S:
                raise
        await asyncio.sleep(delay_s)
        waited_s += delay_s
        delay_s = min(2 * delay_s, LONGEST_DELAY_S)


async def merge(streams: Sequence[TextPieces]) -> TextPieces:
    """Interleave ``streams``; the first error ends them all.

    The queue is as long as there are streams, so a slow client slows the engine's readers.
    """
    queue: asyncio.Queue[TextPiece | Exception | None] = asyncio.Queue(maxsize=len(streams))

    async def pump(stream: TextPieces) -> None:
        try:
            async with aclosing(stream) as pieces:
                async for piece in pieces:
                    await queue.put(piece)
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    num_running = len(tasks)
    try:
        while num_running:
            item = await queue.get()
            if item is None:
                num_running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
