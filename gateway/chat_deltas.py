"""Parsed deltas as OpenAI's chat objects have them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gateway.parsers.deltas import (
    CallArguments,
    CallStart,
    ContentDelta,
    Delta,
    ReasoningDelta,
    merged,
)

Json = dict[str, Any]


def delta_object(delta: Delta) -> Json:
    """Return the ``delta`` of a stream chunk."""
    match delta:
        case ContentDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case CallStart(call, call_id, name):
            function = {"name": name, "arguments": ""}
            start = {"index": call, "id": call_id, "type": "function", "function": function}
            return {"tool_calls": [start]}
        case CallArguments(call, text):
            return {"tool_calls": [{"index": call, "function": {"arguments": text}}]}


def parsed_message(deltas: Iterable[Delta]) -> Json:
    """Return what a whole message has of ``deltas``: fields that would be empty are left out.

    ``content`` is None where there are calls and nothing else.
    """
    content, reasoning = "", ""
    calls: list[Json] = []
    for delta in merged(deltas):
        match delta:
            case ContentDelta(text):
                content += text
            case ReasoningDelta(text):
                reasoning += text
            case CallStart(_, call_id, name):
                function = {"name": name, "arguments": ""}
                calls.append({"id": call_id, "type": "function", "function": function})
            case CallArguments(call, text):
                calls[call]["function"]["arguments"] += text
    message: Json = {"content": None if calls and not content else content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message
