"""How the objects of a stream are written: here as server-sent events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from json.encoder import encode_basestring
from typing import Any, NamedTuple, Protocol

PLACE = "\0"
"""Stands for the text in a template's sample."""


class TextFiller(Protocol):
    """A written object of which only one string changes."""

    def fill(self, text: str) -> bytes:
        """Return the object with ``text``."""


class Framing(Protocol):
    """Writes the objects of one stream. Owner: one response."""

    media_type: str
    done: bytes
    """The end of a stream that is complete."""

    def head(self, chunk: Mapping[str, Any]) -> bytes:
        """Return what goes before everything else; ``chunk`` has what all chunks have in common."""

    def event(self, data: Mapping[str, Any]) -> bytes:
        """Return ``data`` as one event."""

    def text_template(self, sample: Mapping[str, Any]) -> TextFiller:
        """Return the template of ``sample``, in which ``PLACE`` stands once, where the text goes."""


class SseText(NamedTuple):
    """A server-sent event of which only one string changes."""

    before: bytes
    after: bytes

    def fill(self, text: str) -> bytes:
        """Return the event with ``text``."""
        return self.before + encode_basestring(text).encode() + self.after


class SseFraming:
    """Server-sent events with JSON, as OpenAI's API has them. Keeps nothing."""

    media_type = "text/event-stream"
    done = b"data: [DONE]\n\n"

    def head(self, chunk: Mapping[str, Any]) -> bytes:
        """Return nothing: every event is complete in itself."""
        return b""

    def event(self, data: Mapping[str, Any]) -> bytes:
        """Return one event that carries ``data`` as JSON."""
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        return b"data: " + text.encode() + b"\n\n"

    def text_template(self, sample: Mapping[str, Any]) -> SseText:
        """See ``Framing``."""
        before, _, after = self.event(sample).rpartition(encode_basestring(PLACE).encode())
        return SseText(before, after)
