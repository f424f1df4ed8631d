from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loadtest_fakes import frame

from loadtest.sse_client import SSEEvent, SSEParser, StreamError, read_chat_stream

pytestmark = pytest.mark.unit


def delta(content: str | None = None, reason: str | None = None, **extra: object) -> bytes:
    body = {**extra} if content is None else {"content": content, **extra}
    return frame({"choices": [{"index": 0, "delta": body, "finish_reason": reason}]})


ROLE = delta("", role="assistant")
DONE = b"data: [DONE]\n\n"
USAGE = frame({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 6}})


def read(*pieces: bytes) -> object:
    ticks = itertools.count()
    return read_chat_stream(pieces, lambda: float(next(ticks)))


def test_reads_a_whole_answer() -> None:
    stats = {"committed_per_cycle": [3, 2], "acceptance_length": 2.5}
    last = frame(
        {
            "choices": [{"index": 0, "delta": {"content": "!"}, "finish_reason": "stop"}],
            "dflash": stats,
        }
    )
    stream = read_chat_stream(
        [ROLE, delta("He"), delta("llo wörld"), last, USAGE, DONE], iter(range(9)).__next__
    )
    assert stream.text == "Hello wörld!"
    assert [(c.arrival_s, c.text, c.is_final) for c in stream.chunks] == [
        (1, "He", False),
        (2, "llo wörld", False),
        (3, "!", True),
    ]
    assert stream.completion_tokens == 6
    assert stream.finish_reason == "stop"
    assert stream.stats == stats


def test_a_step_without_text_is_kept_and_the_role_chunk_is_not() -> None:
    stream = read_chat_stream(
        [ROLE, delta(""), delta("é", "length"), DONE], iter(range(9)).__next__
    )
    assert [chunk.text for chunk in stream.chunks] == ["", "é"]


@given(st.lists(st.integers(min_value=1, max_value=40), max_size=30))
def test_any_split_of_the_bytes_gives_the_same_events(cuts: list[int]) -> None:
    body = b": ping\r\n\r\nevent: note\r\ndata: a\r\ndata: b\xc3\xa9\r\n\r\ndata:c\n\nid: 7\n\n"
    parser, events, start = SSEParser(), [], 0
    for cut in [*cuts, len(body)]:
        events += parser.feed(body[start : start + cut])
        start += cut
    assert events == [SSEEvent("a\nbé", "note"), SSEEvent("c")]


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([ROLE, delta("x", "stop")], "without \\[DONE\\]"),
        ([ROLE, delta("x"), DONE], "without a finish reason"),
        (
            [ROLE, frame({"error": {"code": "engine_failed", "message": "lost"}})],
            "engine_failed: lost",
        ),
        ([b'event: error\ndata: {"message": "m", "code": "c"}\n\n'], "c: m"),
        ([b"data: {half\n\n"], "not JSON"),
        ([], "after 0 chunks"),
    ],
)
def test_a_broken_stream_is_an_error(pieces: list[bytes], message: str) -> None:
    with pytest.raises(StreamError, match=message):
        read(*pieces)
