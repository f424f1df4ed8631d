"""Reads a streamed chat completion: bytes to events, events to timed chunks.

Pure logic without a network or a clock of its own, so every broken stream can be played to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

DONE = "[DONE]"


class StreamError(Exception):
    """The stream did not end as a complete answer; the message says how."""


@dataclass(frozen=True)
class SSEEvent:
    """One server-sent event: ``data`` is its data lines joined, ``name`` its event field."""

    data: str
    name: str = "message"


class SSEParser:
    """Turns byte pieces of any size into events. Comments and ids are dropped.

    Owner: one stream. Keeps the bytes of an unfinished line and the fields of an unfinished event.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []
        self._name = ""

    def feed(self, piece: bytes) -> Iterator[SSEEvent]:
        """Yield the events that ``piece`` completes. Mutates the parser."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            event = self._take_line(line.rstrip(b"\r").decode("utf-8", errors="replace"))
            if event is not None:
                yield event

    def _take_line(self, line: str) -> SSEEvent | None:
        if line:
            key, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if key == "data":
                self._data.append(value)
            elif key == "event":
                self._name = value
            return None
        data, name = self._data, self._name
        self._data, self._name = [], ""
        return SSEEvent("\n".join(data), name or "message") if data else None


@dataclass(frozen=True)
class Chunk:
    """What one event added to the answer.

    ``is_final``: it carries the finish reason. ``arrival_s`` is on the clock the reader was given.
    """

    arrival_s: float
    text: str
    is_final: bool = False


@dataclass
class ChatStream:
    """A complete streamed answer.

    ``chunks`` holds one entry per event with a choice, apart from the opening role chunk; an entry may
    have no text (a token that completes no character yet).
    """

    chunks: list[Chunk] = field(default_factory=list)
    finish_reason: str | None = None
    completion_tokens: int | None = None
    stats: dict[str, Any] | None = None
    """The server's ``dflash`` object, when it sent one."""

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(chunk.text for chunk in self.chunks)


class ChatStreamReader:
    """Reads a chat completion stream piece by piece. Owner: one stream."""

    def __init__(self) -> None:
        self._parser = SSEParser()
        self._stream = ChatStream()

    def feed(self, piece: bytes, arrival_s: float) -> ChatStream | None:
        """Take a piece of the response body in; return the answer once it is complete.

        Raises:
            StreamError: an error event, a body that is not JSON, or an end without a finish reason.
        """
        for event in self._parser.feed(piece):
            if event.data == DONE:
                if self._stream.finish_reason is None:
                    raise StreamError("the stream ended without a finish reason")
                return self._stream
            _take_event(self._stream, event, arrival_s)
        return None

    def ended_early(self) -> StreamError:
        """What to raise when there are no more pieces and no answer yet."""
        return StreamError(
            f"the stream ended after {len(self._stream.chunks)} chunks without {DONE}"
        )


def read_chat_stream(pieces: Iterable[bytes], clock: Callable[[], float]) -> ChatStream:
    """Read a chat completion stream to its end.

    Args:
        pieces: the response body, in pieces as they arrive.
        clock: returns seconds; read once per piece, when it arrives.

    Raises:
        StreamError: see ``ChatStreamReader``, or no ``[DONE]``.
    """
    reader = ChatStreamReader()
    for piece in pieces:
        stream = reader.feed(piece, clock())
        if stream is not None:
            return stream
    raise reader.ended_early()


def _take_event(stream: ChatStream, event: SSEEvent, arrival_s: float) -> None:
    try:
        payload = json.loads(event.data)
    except ValueError as error:
        raise StreamError(f"event is not JSON: {event.data[:200]!r}") from error
    if event.name == "error" or not isinstance(payload, dict) or payload.get("error"):
        raise StreamError(f"error event: {_error_message(payload)}")
    usage = payload.get("usage")
    if usage:
        stream.completion_tokens = usage.get("completion_tokens")
    if isinstance(payload.get("dflash"), dict):
        stream.stats = payload["dflash"]
    for choice in payload.get("choices", ()):
        delta = choice.get("delta") or {}
        text = delta.get("content") or ""
        reason = choice.get("finish_reason")
        if reason is not None:
            stream.finish_reason = reason
        if text or reason is not None or "role" not in delta:
            stream.chunks.append(Chunk(arrival_s, text, reason is not None))


def _error_message(payload: object) -> str:
    error = payload.get("error", payload) if isinstance(payload, dict) else payload
    if isinstance(error, dict):
        return f"{error.get('code')}: {error.get('message')}"
    return str(error)
