"""Tool calls as Llama 3 writes them: the answer is ``{"name": ..., "parameters": {...}}`` and nothing else.

Several calls are separated by ``;``. A model may write ``<|python_tag|>`` first.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto

from gateway.parsers.call_deltas import CallDeltas
from gateway.parsers.deltas import ContentDelta, Delta
from gateway.parsers.held_text import WHITESPACE
from gateway.parsers.json_call import JsonCall

PYTHON_TAG = "<|python_tag|>"
SEPARATORS = ";,"


class _State(Enum):
    BEFORE = auto()
    IN_CALL = auto()
    BEHIND_CALL = auto()
    BEHIND_SEPARATOR = auto()
    CONTENT = auto()


class Llama3Tools(CallDeltas):
    """Tells calls from content. Owner: one sequence.

    No tag says what a call is, so only an object with a call's keys and the name of a tool of the request is
    one; any other object is content, as is everything behind it.

    Args:
        names: of the request's tools.
    """

    MARKERS = (PYTHON_TAG,)

    def __init__(self, names: Collection[str] = ()) -> None:
        super().__init__()
        self._names = frozenset(names)
        self._state = _State.BEFORE
        self._call = JsonCall(self._names, is_strict=True)
        self._held = ""

    def push(self, text: str) -> list[Delta]:
        """Return what ``text`` adds. Mutates."""
        deltas: list[Delta] = []
        text, self._held = self._held + text, ""
        while text:
            match self._state:
                case _State.BEFORE:
                    text = self._open(text)
                case _State.IN_CALL:
                    text = self._read_call(text, deltas)
                case _State.CONTENT:
                    deltas.append(ContentDelta(text))
                    text = ""
                case _:
                    text = self._read_between(text)
        return deltas

    def flush(self) -> list[Delta]:
        """Return what is held back; the text ends here. Mutates."""
        held, self._held = self._held, ""
        if self._state is _State.IN_CALL:
            held = "" if self._call.has_started else self._call.raw
        elif self._state in (_State.BEHIND_CALL, _State.BEHIND_SEPARATOR):
            held = ""
        return [ContentDelta(held)] if held else []

    def _open(self, text: str) -> str:
        stripped = text.lstrip(WHITESPACE)
        if PYTHON_TAG.startswith(stripped) and stripped != PYTHON_TAG:
            self._held = text
            return ""
        stripped = stripped.removeprefix(PYTHON_TAG)
        behind_tag = stripped.lstrip(WHITESPACE)
        if not behind_tag:
            self._held = text
            return ""
        if behind_tag.startswith("{"):
            self._state = _State.IN_CALL
            return behind_tag
        self._state = _State.CONTENT
        return text

    def _read_call(self, text: str, deltas: list[Delta]) -> str:
        call = self._call
        rest, is_over = self._feed(call, text, deltas)
        if is_over:
            self._state = _State.BEHIND_CALL
        elif call.has_failed:
            self._state = _State.CONTENT
            return call.raw + rest
        return rest

    def _read_between(self, text: str) -> str:
        """Pass over what separates calls; return what follows, or hold it back."""
        rest = text.lstrip(WHITESPACE)
        if not rest:
            self._held = text
            return ""
        if self._state is _State.BEHIND_CALL and rest[0] in SEPARATORS:
            self._state = _State.BEHIND_SEPARATOR
            return rest[1:]
        if rest[0] == "{":
            self._call = JsonCall(self._names, is_strict=True)
            self._state = _State.IN_CALL
        else:
            self._state = _State.CONTENT
        return rest
