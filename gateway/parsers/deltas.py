"""What parsers find, in order."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import NamedTuple


class ContentDelta(NamedTuple):
    """More of the answer."""

    text: str


class ReasoningDelta(NamedTuple):
    """More of what the model thinks before it answers."""

    text: str


class CallStart(NamedTuple):
    """A tool call begins."""

    call: int
    """Its place among the calls of the choice."""
    call_id: str
    name: str


class CallArguments(NamedTuple):
    """More of a call's arguments, which are JSON as the model wrote it."""

    call: int
    text: str


Delta = ContentDelta | ReasoningDelta | CallStart | CallArguments


def new_call_id() -> str:
    """Return an id that no other call has."""
    return f"call_{uuid.uuid4().hex[:24]}"


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """Return ``deltas`` with neighbours of one kind joined and empty ones left out."""
    joined: list[Delta] = []
    for delta in deltas:
        before = joined[-1] if joined else None
        match before, delta:
            case ContentDelta(text), ContentDelta(more):
                joined[-1] = ContentDelta(text + more)
            case ReasoningDelta(text), ReasoningDelta(more):
                joined[-1] = ReasoningDelta(text + more)
            case CallArguments(call, text), CallArguments(same, more) if call == same:
                joined[-1] = CallArguments(call, text + more)
            case _, CallStart():
                joined.append(delta)
            case _ if delta.text:
                joined.append(delta)
    return joined
