"""What an event stream costs beside msgpack frames, without HTTP: ``make bench-framing``.

One chat answer after the other is written by the gateway's own builder and read back as a client would:
JSON behind ``data: ``, or length-prefixed msgpack. Prints bytes and CPU time per token, the median of
``--repeats`` interleaved rounds; the last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import msgpack

from dflash_wire.records import FinishReason, GenerationRequest, GenerationStats
from gateway.framing import Framing, SseFraming
from gateway.generation import TextPiece, TextPieces
from gateway.msgpack_framing import LENGTH_BYTES, MsgpackFraming
from gateway.responses import ChatShape, ResponseBuilder, ResponseHead
from gateway.validation import SequencePlan

CHARS_PER_TOKEN = 4
FRAMINGS: dict[str, Callable[[], Framing]] = {"sse": SseFraming, "msgpack": MsgpackFraming}


@dataclass(frozen=True, slots=True)
class FramingCost:
    """One framing, per output token."""

    framing: str
    bytes_per_token: float
    write_us_per_token: float
    """CPU of the gateway's builder."""
    read_us_per_token: float
    """CPU of a client that takes the text out."""


async def pieces_of(num_events: int, tokens_per_event: int) -> TextPieces:
    """Yield the pieces of one answer."""
    text = "word " * num_events * tokens_per_event
    size = CHARS_PER_TOKEN * tokens_per_event
    for i in range(num_events - 1):
        yield TextPiece(0, text[i * size : (i + 1) * size], (i + 1) * tokens_per_event)
    num_tokens = num_events * tokens_per_event
    yield TextPiece(0, text[:size], num_tokens, FinishReason.LENGTH, GenerationStats())


async def write(framing: Framing, num_events: int, tokens_per_event: int) -> list[bytes]:
    """Return one answer's writes."""
    plan = SequencePlan(0, GenerationRequest("x", [1], 1), ())
    builder = ResponseBuilder(
        ResponseHead("chatcmpl-0123456789abcdef0123456789abcdef", "dflash-demo", "dflash-0.1.0"),
        ChatShape(),
        [plan],
        "adaptive",
        wants_stats=False,
        wants_usage_chunk=False,
        framing=framing,
    )
    return [data async for data in builder.events(pieces_of(num_events, tokens_per_event))]


def read_sse(data: bytes) -> str:
    """Return an event stream's text."""
    text = []
    for event in data.split(b"\n\n"):
        payload = event.removeprefix(b"data: ")
        if payload and payload != b"[DONE]":
            text.append(json.loads(payload)["choices"][0]["delta"].get("content") or "")
    return "".join(text)


def read_msgpack(data: bytes) -> str:
    """Return the text of a stream of frames."""
    text, place = [], 0
    while place < len(data):
        end = place + LENGTH_BYTES + int.from_bytes(data[place : place + LENGTH_BYTES], "big")
        value = msgpack.unpackb(data[place + LENGTH_BYTES : end])
        if value is not None and "choices" in value:
            text.append(value["choices"][0]["delta"].get("content") or "")
        place = end
    return "".join(text)


READERS: dict[str, Callable[[bytes], str]] = {"sse": read_sse, "msgpack": read_msgpack}


def measure(name: str, num_events: int, tokens_per_event: int) -> FramingCost:
    """Write and read one answer."""
    began = time.process_time()
    writes = asyncio.run(write(FRAMINGS[name](), num_events, tokens_per_event))
    written = time.process_time()
    data = b"".join(writes)
    joined = time.process_time()
    text = READERS[name](data)
    ended = time.process_time()
    assert len(text) == CHARS_PER_TOKEN * tokens_per_event * num_events
    num_tokens = num_events * tokens_per_event
    return FramingCost(
        name,
        len(data) / num_tokens,
        1e6 * (written - began) / num_tokens,
        1e6 * (ended - joined) / num_tokens,
    )


def median(costs: Sequence[FramingCost]) -> FramingCost:
    """Return the median of every figure."""
    names = ("bytes_per_token", "write_us_per_token", "read_us_per_token")
    figures = {name: statistics.median(getattr(cost, name) for cost in costs) for name in names}
    return FramingCost(costs[0].framing, **figures)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(prog="python -m services.bench_framing", description=__doc__)
    parser.add_argument("--events", type=int, default=20_000, help="per answer")
    parser.add_argument("--tokens-per-event", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    costs: dict[str, list[FramingCost]] = {name: [] for name in FRAMINGS}
    for _ in range(options.repeats):
        for name in FRAMINGS:
            costs[name].append(measure(name, options.events, options.tokens_per_event))
    rows = [median(costs[name]) for name in FRAMINGS]
    print("framing  bytes/token  write us/token  read us/token")
    for row in rows:
        print(
            f"{row.framing:7}  {row.bytes_per_token:11.1f}  {row.write_us_per_token:14.2f}  "
            f"{row.read_us_per_token:13.2f}"
        )
    print(json.dumps({"settings": vars(options), "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
