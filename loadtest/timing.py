"""Time to first token and time per output token of a stream whose chunks hold several tokens.

With speculation a chunk is one cycle's committed tokens, so the gap between chunks is not the time of
a token. The time per output token divides by tokens, and leaves out those that were there already when
the clock of the first chunk was read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.sse_client import ChatStream, Chunk


@dataclass(frozen=True)
class StreamTiming:
    """Times of one streamed answer, in seconds unless the name says otherwise."""

    ttft_s: float
    """Request sent to first non-empty text."""
    tpot_s: float | None
    """Per output token after the first chunk; None when everything came in one chunk."""
    e2e_s: float
    """Request sent to last token."""
    completion_tokens: int
    tokens_in_first_chunk: int
    num_chunks: int
    """Chunks with text."""

    @property
    def tokens_per_s(self) -> float:
        """Output tokens over the whole request, prefill included."""
        return self.completion_tokens / self.e2e_s if self.e2e_s > 0 else 0.0


def tokens_in_first_chunk(
    chunks: Sequence[Chunk], completion_tokens: int, committed_per_cycle: Sequence[int] | None
) -> int:
    """Tokens that had arrived when the first text was seen.

    The prefill samples one token and every cycle commits some; the server sends one chunk per step,
    in order. Chunks without text before the first text (half a character, say) count with it.

    Args:
        chunks: as ``ChatStream.chunks``; at least one has text.
        completion_tokens: from the server's usage.
        committed_per_cycle: from the server's stats; None without them, then one token is assumed.
    """
    if committed_per_cycle is None:
        return 1
    from_prefill = completion_tokens - sum(committed_per_cycle)
    steps = [from_prefill, *committed_per_cycle] if from_prefill > 0 else list(committed_per_cycle)
    if from_prefill < 0 or not steps:
        return 1
    first = next(index for index, chunk in enumerate(chunks) if chunk.text)
    return min(completion_tokens, sum(steps[: first + 1]))


def stream_timing(stream: ChatStream, start_s: float) -> StreamTiming | None:
    """Times of a complete stream whose request was sent at ``start_s``; None for an empty answer.

    Raises:
        ValueError: there is text but no usage, so its tokens are unknown.
    """
    with_text = [chunk for chunk in stream.chunks if chunk.text]
    if not with_text:
        return None
    if not stream.completion_tokens:
        raise ValueError("the stream has no usage; ask for it with stream_options.include_usage")
    committed = (stream.stats or {}).get("committed_per_cycle")
    num_first = tokens_in_first_chunk(stream.chunks, stream.completion_tokens, committed)
    first_s = with_text[0].arrival_s
    last_s = stream.chunks[-1].arrival_s
    num_later = stream.completion_tokens - num_first
    return StreamTiming(
        ttft_s=first_s - start_s,
        tpot_s=(last_s - first_s) / num_later if num_later > 0 else None,
        e2e_s=last_s - start_s,
        completion_tokens=stream.completion_tokens,
        tokens_in_first_chunk=num_first,
        num_chunks=len(with_text),
    )


def percentile(values: Sequence[float], rank: float) -> float:
    """Linear-interpolated percentile; ``rank`` in 0..100.

    Raises:
        ValueError: ``values`` is empty.
    """
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * rank / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
