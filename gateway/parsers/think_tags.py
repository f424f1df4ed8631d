"""Reasoning between ``<think>`` and ``</think>``: Qwen3, QwQ, DeepSeek R1 and models like them."""

from __future__ import annotations

from enum import Enum, auto

from gateway.parsers.deltas import ContentDelta, Delta, ReasoningDelta
from gateway.parsers.held_text import WHITESPACE, split_held

THINK, END_THINK = "<think>", "</think>"


class _State(Enum):
    BEFORE = auto()
    """Nothing but whitespace and a beginning of ``<think>`` so far."""
    INSIDE = auto()
    AFTER = auto()


class ThinkTags:
    """Splits a sequence's text into reasoning and content. Owner: one sequence.

    Only reasoning at the very beginning is split off. Tags and the whitespace around them belong to neither
    part. A text that ends while the model thinks is all reasoning.

    Args:
        starts_inside: the prompt ends with ``<think>``, so the text begins behind it.
    """

    MARKERS = (THINK, END_THINK)

    def __init__(self, starts_inside: bool = False) -> None:
        self._starts_inside = starts_inside
        self._state = _State.BEFORE
        self._held = ""
        self._drops_whitespace = False
        """Until the part that has begun has a character that is not whitespace."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the next character belongs to the reasoning, as far as one can tell."""
        return self._state is _State.INSIDE or (
            self._state is _State.BEFORE and self._starts_inside
        )

    @property
    def has_ended(self) -> bool:
        """Whether all text from here on is content, whitespace included."""
        return self._state is _State.AFTER and not self._drops_whitespace

    def push(self, text: str) -> list[Delta]:
        """Return what ``text`` adds. Mutates."""
        deltas: list[Delta] = []
        text = self._held + text
        self._held = ""
        if self._state is _State.BEFORE:
            text = self._open(text)
        if self._state is _State.INSIDE:
            text = self._think(text, deltas)
        if self._state is _State.AFTER:
            text = self._without_leading_whitespace(text)
            if text:
                deltas.append(ContentDelta(text))
        return deltas

    def flush(self) -> list[Delta]:
        """Return what is held back; the text ends here. Mutates."""
        held, self._held = self._held, ""
        if self._state is _State.INSIDE or (self._state is _State.BEFORE and self._starts_inside):
            held = held.rstrip(WHITESPACE)
            return [ReasoningDelta(held)] if held else []
        return [ContentDelta(held)] if held else []

    def _open(self, text: str) -> str:
        """Decide whether there is reasoning; return the text behind its tag, or hold the text back."""
        stripped = text.lstrip(WHITESPACE)
        if stripped.startswith(THINK):
            self._enter(_State.INSIDE)
            return stripped[len(THINK) :]
        if THINK.startswith(stripped):
            self._held = text
            return ""
        if self._starts_inside:
            self._enter(_State.INSIDE)
        else:
            self._state = _State.AFTER  # an answer without reasoning is content as it is
        return text

    def _think(self, text: str, deltas: list[Delta]) -> str:
        """Take reasoning from the beginning of ``text``; return what follows it."""
        text = self._without_leading_whitespace(text)
        reasoning, tag, rest = text.partition(END_THINK)
        if tag:
            reasoning = reasoning.rstrip(WHITESPACE)
            self._enter(_State.AFTER)
        else:
            reasoning, self._held = split_held(text, END_THINK)
        if reasoning:
            deltas.append(ReasoningDelta(reasoning))
        return rest

    def _enter(self, state: _State) -> None:
        self._state = state
        self._drops_whitespace = True

    def _without_leading_whitespace(self, text: str) -> str:
        if self._drops_whitespace:
            text = text.lstrip(WHITESPACE)
            self._drops_whitespace = not text
        return text
