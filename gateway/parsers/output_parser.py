"""One sequence's output as deltas: reasoning first, then content and tool calls."""

from __future__ import annotations

from typing import Protocol

from gateway.parsers.deltas import ContentDelta, Delta
from gateway.parsers.think_tags import ThinkTags


class ToolParser(Protocol):
    """Splits text into content and calls, whatever the format. Owner: one sequence."""

    num_calls: int
    """Calls that have begun."""
    num_complete_calls: int

    def push(self, text: str) -> list[Delta]:
        """Return what ``text`` adds. Mutates."""

    def flush(self) -> list[Delta]:
        """Return what is held back; the text ends here. Mutates."""


class OutputParser:
    """A sequence's reasoning parser and tool parser, one behind the other. Owner: one sequence.

    Args:
        reasoning: None if the model's reasoning is not split off.
        tools: None if the request has no tools.
        most_calls: the output has ended with so many complete calls; None: with any number.
    """

    def __init__(
        self, reasoning: ThinkTags | None, tools: ToolParser | None, most_calls: int | None = None
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._most_calls = most_calls

    @property
    def is_reasoning(self) -> bool:
        """Whether the model thinks, as far as its text so far tells."""
        return self._reasoning is not None and self._reasoning.is_reasoning

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._tools.num_calls if self._tools is not None else 0

    @property
    def has_ended(self) -> bool:
        """Whether no more calls are wanted than there are."""
        if self._tools is None or self._most_calls is None:
            return False
        return self._tools.num_complete_calls >= self._most_calls

    @property
    def passes_through(self) -> bool:
        """Whether all text from here on is content, as it is."""
        return self._tools is None and (self._reasoning is None or self._reasoning.has_ended)

    def push(self, text: str) -> list[Delta]:
        """Return what ``text`` adds. Mutates."""
        if self._reasoning is None:
            return self._push_content([ContentDelta(text)])
        return self._push_content(self._reasoning.push(text))

    def flush(self) -> list[Delta]:
        """Return what is held back; the text ends here. Mutates."""
        held = [] if self._reasoning is None else self._push_content(self._reasoning.flush())
        return held if self._tools is None else held + self._tools.flush()

    def _push_content(self, deltas: list[Delta]) -> list[Delta]:
        if self._tools is None:
            return deltas
        found: list[Delta] = []
        for delta in deltas:
            found += self._tools.push(delta.text) if isinstance(delta, ContentDelta) else [delta]
        return found
