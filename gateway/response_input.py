"""The items of a ``/v1/responses`` conversation as chat messages."""

from __future__ import annotations

from typing import Any

from dflash_wire.errors import InvalidRequestError
from gateway.errors import UnsupportedParameterError

Json = dict[str, Any]
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def chat_messages(items: str | list[Json], instructions: str | None) -> list[Json]:
    """Return the conversation, instructions first.

    Calls and reasoning are items of their own here; in chat messages they belong to the assistant's turn.

    Raises:
        InvalidRequestError: an item is malformed.
        UnsupportedParameterError: an item is of a kind that is not offered.
    """
    messages: list[Json] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    turn = _Turn(messages)
    for index, item in enumerate(items):
        turn.add(item, f"input[{index}]")
    return messages


class _Turn:
    """Puts items into messages, those of one assistant's turn into one. Owner: ``chat_messages``."""

    def __init__(self, messages: list[Json]) -> None:
        self._messages = messages
        self._is_open = False
        """The last message is an assistant's to which calls may still be added."""
        self._reasoning = ""

    def add(self, item: Json, where: str) -> None:
        """Take in one item. Mutates the messages."""
        match item.get("type", "message"):
            case "message":
                self._add_message(item, where)
            case "function_call":
                self._add_call(item, where)
            case "function_call_output":
                result = {"role": "tool", "content": _text(item.get("output"), where, "output")}
                self._messages.append(result | {"tool_call_id": _string(item, "call_id", where)})
                self._is_open = False
            case "reasoning":
                parts = item.get("content") or item.get("summary") or []
                self._reasoning += _text(parts, where, "content")
            case kind:
                raise UnsupportedParameterError(
                    f"{where}: items of type {str(kind)[:40]!r} are not supported.", where
                )

    def _add_message(self, item: Json, where: str) -> None:
        role = _string(item, "role", where)
        message = {"role": role, "content": _text(item.get("content"), where, "content")}
        self._is_open = role == "assistant"
        self._append(message)

    def _add_call(self, item: Json, where: str) -> None:
        if not self._is_open:
            self._append({"role": "assistant", "content": ""})
            self._is_open = True
        function = {name: _string(item, name, where) for name in ("name", "arguments")}
        call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
        self._messages[-1].setdefault("tool_calls", []).append(call)

    def _append(self, message: Json) -> None:
        if self._reasoning and message["role"] == "assistant":
            message["reasoning_content"] = self._reasoning
        self._reasoning = ""
        self._messages.append(message)


def _string(item: Json, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{where}.{name} must be a string.", f"{where}.{name}")
    return value


def _text(value: object, where: str, name: str) -> str:
    """Return a string, or the text of parts, one per line."""
    if isinstance(value, str):
        return value
    place = f"{where}.{name}"
    if not isinstance(value, list):
        raise InvalidRequestError(f"{place} must be a string or a list of text parts.", place)
    texts = []
    for part in value:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise InvalidRequestError(f"{place} must have parts with a 'text'.", place)
        if part.get("type") not in TEXT_PARTS:
            raise UnsupportedParameterError(f"{place}: only text parts are supported.", place)
        texts.append(part["text"])
    return "\n".join(texts)
