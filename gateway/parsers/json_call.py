"""Reads one tool call, ``{"name": ..., "arguments": {...}}``, while the model writes it."""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum, auto

from gateway.parsers.held_text import WHITESPACE

ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
CALL_KEYS = frozenset({"type", "name", *ARGUMENT_KEYS})
OPENING, CLOSING = "{[", "}]"


class _Expects(Enum):
    OBJECT = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()


class JsonCall:
    """One call, character by character. Owner: one sequence's tool parser.

    The arguments go out as the model writes them, as soon as the name is known: a text of JSON, which a
    parser of JSON must check. If the model wraps them in a string, they are what the string says.

    Invariant: exactly one of reading, ``is_done`` and ``has_failed``; after that ``push`` takes nothing.

    Args:
        names: the only names a call may have; None allows any.
        is_strict: fail at a key that no call has. Without it such keys are passed over.
    """

    def __init__(self, names: Collection[str] | None = None, is_strict: bool = False) -> None:
        self._names = names
        self._is_strict = is_strict
        self._expects: _Expects | None = _Expects.OBJECT
        """None inside a string or a value."""
        self._key = ""
        self._piece: list[str] = []
        """The key or the value that is being read."""
        self._is_key = False
        self._depth = 0
        """Of the value that is being read."""
        self._in_string = False
        self._is_escaped = False
        self._streams = False
        """The value that is being read is the arguments, and goes out at once."""
        self._arguments: str | None = None
        """Arguments that were complete before the name was known."""
        self._raw: list[str] = []
        self._new: list[str] = []
        self.name: str | None = None
        self.has_started = False
        """The name is known and the arguments have begun: the call can be announced."""
        self.is_done = False
        self.has_failed = False

    @property
    def raw(self) -> str:
        """All that was taken so far."""
        return "".join(self._raw)

    def take_arguments(self) -> str:
        """Return the arguments that are new since the last time. Mutates."""
        new, self._new = "".join(self._new), []
        return new

    def push(self, text: str) -> int:
        """Read as far as the call goes; return how many characters that were. Mutates.

        A character that cannot be is not taken.
        """
        for count, character in enumerate(text):
            if self.is_done:
                return count
            self._read(character)
            if self.has_failed:
                return count
            self._raw.append(character)
        return len(text)

    def _read(self, character: str) -> None:
        if self._expects is None:
            self._read_inside(character)
        elif character not in WHITESPACE:
            self._read_between(character, self._expects)

    def _read_between(self, character: str, expects: _Expects) -> None:
        match expects, character:
            case _Expects.OBJECT, "{":
                self._expects = _Expects.FIRST_KEY
            case ((_Expects.FIRST_KEY | _Expects.KEY), '"'):
                self._begin(character, is_key=True)
            case _Expects.COLON, ":":
                self._expects = _Expects.VALUE
            case _Expects.VALUE, _ if character not in ",:" + CLOSING:
                self._begin(character, is_key=False)
            case _Expects.COMMA, ",":
                self._expects = _Expects.KEY
            case ((_Expects.COMMA | _Expects.FIRST_KEY), "}"):
                self._end()
            case _:
                self._fail()

    def _begin(self, character: str, is_key: bool) -> None:
        self._expects = None
        self._is_key = is_key
        self._piece = []
        is_arguments = not is_key and self._key in ARGUMENT_KEYS and not self.has_started
        self._streams = is_arguments and character == "{" and self.name is not None
        self.has_started |= self._streams
        self._read_inside(character)

    def _read_inside(self, character: str) -> None:
        """Read one character of a key or a value."""
        if self._in_string:
            self._keep(character)
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._in_string = False
                if self._depth == 0:
                    self._end_piece()
            return
        if self._depth == 0 and self._piece and (character in ",}" or character in WHITESPACE):
            self._end_piece()  # a number or a word ends with what follows it
            if not self.has_failed:
                self._read(character)
            return
        self._keep(character)
        if character == '"':
            self._in_string = True
        elif character in OPENING:
            self._depth += 1
        elif character in CLOSING:
            self._depth -= 1
            if self._depth <= 0:
                self._end_piece()

    def _keep(self, character: str) -> None:
        (self._new if self._streams else self._piece).append(character)

    def _end_piece(self) -> None:
        self._depth = 0
        text = "".join(self._piece)
        if self._is_key:
            self._expects = _Expects.COLON
            self._key = str(self._decoded(text) or "")
            if self._is_strict and self._key not in CALL_KEYS:
                self._fail()
            return
        self._expects = _Expects.COMMA
        if self._streams:
            self._streams = False
        elif self._key == "name" and self.name is None:
            self._take_name(self._decoded(text))
        elif self._key in ARGUMENT_KEYS and not self.has_started:
            self._take_arguments(text)

    def _take_name(self, name: object) -> None:
        if (
            not isinstance(name, str)
            or not name
            or (self._names is not None and name not in self._names)
        ):
            self._fail()
        else:
            self.name = name
            if self._arguments is not None:
                self._start(self._arguments)

    def _take_arguments(self, text: str) -> None:
        if text.startswith('"'):
            text = str(self._decoded(text) or "{}")
        elif not text.startswith("{"):
            text = "{}"  # null and the like: there are none
        if self.name is None:
            self._arguments = text
        else:
            self._start(text)

    def _start(self, arguments: str) -> None:
        self.has_started = True
        self._new.append(arguments)

    def _end(self) -> None:
        if self.name is None:
            self._fail()
            return
        if not self.has_started:
            self._start("{}")
        self.is_done = True

    def _fail(self) -> None:
        self.has_failed = True
        self._expects = None

    @staticmethod
    def _decoded(text: str) -> object:
        try:
            return json.loads(text, strict=False)
        except (ValueError, RecursionError):
            return None
