"""Tool calls as Hermes and Qwen models write them: JSON between ``<tool_call>`` and ``</tool_call>``."""

from __future__ import annotations

from collections.abc import Collection

from gateway.parsers.call_deltas import CallDeltas
from gateway.parsers.deltas import ContentDelta, Delta
from gateway.parsers.held_text import WHITESPACE, split_held
from gateway.parsers.json_call import JsonCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
TOO_MANY = "}])" + WHITESPACE
"""What models put behind a call that has ended already."""


class HermesTools(CallDeltas):
    """Splits text into content and calls. Owner: one sequence.

    What follows ``<tool_call>`` and is no call is content, its tag included. Whitespace between content and
    calls belongs to neither.

    Args:
        names: of the request's tools. The tags say what a call is, so a model may name others.
    """

    MARKERS = (OPEN, CLOSE)

    def __init__(self, names: Collection[str] = ()) -> None:
        super().__init__()
        self._call: JsonCall | None = None
        self._held = ""
        self._gap = ""
        """Whitespace before the call that is being read."""
        self._drops_whitespace = False
        """Until there is anything else behind a call."""
        self._is_behind_call = False

    def push(self, text: str) -> list[Delta]:
        """Return what ``text`` adds. Mutates."""
        deltas: list[Delta] = []
        text, self._held = self._held + text, ""
        while text:
            if self._call is not None:
                text = self._read_call(self._call, text, deltas)
            elif self._is_behind_call:
                text = self._close(text)
            else:
                text = self._read_content(text, deltas)
        return deltas

    def flush(self) -> list[Delta]:
        """Return what is held back; the text ends here. Mutates."""
        held, self._held = self._held, ""
        if self._call is not None:
            held = "" if self._call.has_started else self._gap + OPEN + self._call.raw
        elif self._is_behind_call or (self.num_calls and not held.strip(WHITESPACE)):
            held = ""
        self._call = None
        return [ContentDelta(held)] if held else []

    def _read_content(self, text: str, deltas: list[Delta]) -> str:
        if self._drops_whitespace:
            text = text.lstrip(WHITESPACE)
            self._drops_whitespace = not text
        content, tag, rest = text.partition(OPEN)
        if tag:
            before, content = content, content.rstrip(WHITESPACE)
            self._gap = before[len(content) :]
            self._call = JsonCall()
        else:
            content, self._held = split_held(text, OPEN)
        if content:
            deltas.append(ContentDelta(content))
        return rest

    def _read_call(self, call: JsonCall, text: str, deltas: list[Delta]) -> str:
        rest, is_over = self._feed(call, text, deltas)
        if is_over:
            self._call, self._is_behind_call = None, True
        elif call.has_failed:
            self._call = None
            deltas.append(ContentDelta(self._gap + OPEN))
            return call.raw + rest  # a call may begin inside of it
        return rest

    def _close(self, text: str) -> str:
        """Pass over the end of a call; return what follows, or hold back what may be its beginning."""
        text = text.lstrip(TOO_MANY)
        if text.startswith(CLOSE):
            self._is_behind_call, self._drops_whitespace = False, True
            return text[len(CLOSE) :]
        if CLOSE.startswith(text):
            self._held = text
            return ""
        self._is_behind_call = False
        return text
