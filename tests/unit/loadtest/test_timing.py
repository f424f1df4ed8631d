from __future__ import annotations

import pytest

from loadtest.sse_client import ChatStream, Chunk
from loadtest.timing import percentile, stream_timing, tokens_in_first_chunk

pytestmark = pytest.mark.unit


def stream_of(
    *chunks: tuple[float, str], tokens: int | None, committed: list[int] | None
) -> ChatStream:
    return ChatStream(
        chunks=[Chunk(at, text, i == len(chunks) - 1) for i, (at, text) in enumerate(chunks)],
        finish_reason="stop",
        completion_tokens=tokens,
        stats=None if committed is None else {"committed_per_cycle": committed},
    )


def test_time_per_token_divides_by_tokens_not_chunks() -> None:
    # One token of the prefill at 10.5, then cycles of 4 and 5 tokens, 0.9 s apart each.
    stream = stream_of((10.5, "a"), (11.4, "bbbb"), (12.3, "ccccc"), tokens=10, committed=[4, 5])
    timing = stream_timing(stream, start_s=10.0)
    assert timing is not None
    assert timing.ttft_s == pytest.approx(0.5)
    assert timing.tpot_s == pytest.approx(1.8 / 9)
    assert timing.e2e_s == pytest.approx(2.3)
    assert timing.tokens_per_s == pytest.approx(10 / 2.3)
    assert (timing.tokens_in_first_chunk, timing.num_chunks) == (1, 3)


def test_first_text_after_a_silent_step_counts_both_steps() -> None:
    # The prefill's token is half a character; it shows with the first cycle's three tokens.
    stream = stream_of((1.0, ""), (2.0, "éxy"), (3.0, "zz"), tokens=6, committed=[3, 2])
    timing = stream_timing(stream, start_s=0.0)
    assert timing is not None
    assert timing.ttft_s == 2.0
    assert timing.tokens_in_first_chunk == 4
    assert timing.tpot_s == pytest.approx(1.0 / 2)


@pytest.mark.parametrize(
    ("tokens", "committed", "expected"),
    [
        (10, None, 1),
        (10, [4, 5], 1),
        (10, [4, 6], 4),  # the list has the prefill's share in it
        (10, [4, 9], 1),  # longer than the answer: not to be trusted
        (1, [], 1),
        (3, [], 3),  # everything came from one step
    ],
)
def test_tokens_in_first_chunk(tokens: int, committed: list[int] | None, expected: int) -> None:
    chunks = [Chunk(1.0, "a"), Chunk(2.0, "b", True)]
    assert tokens_in_first_chunk(chunks, tokens, committed) == expected


def test_one_chunk_has_no_time_per_token() -> None:
    timing = stream_timing(stream_of((1.0, "a"), tokens=1, committed=[]), start_s=0.0)
    assert timing is not None and timing.tpot_s is None


def test_an_empty_answer_has_no_timing() -> None:
    assert stream_timing(stream_of((1.0, ""), tokens=1, committed=[]), start_s=0.0) is None


def test_text_without_usage_is_an_error() -> None:
    with pytest.raises(ValueError, match="include_usage"):
        stream_timing(stream_of((1.0, "a"), tokens=None, committed=None), start_s=0.0)


def test_percentile_interpolates() -> None:
    assert [percentile([4.0, 1.0, 3.0, 2.0], rank) for rank in (0, 50, 100)] == [1.0, 2.5, 4.0]
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)
