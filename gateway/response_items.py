"""Output items of ``/v1/responses`` and the events that tell of them, made from parsed deltas."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from gateway.parsers.deltas import CallArguments, CallStart, ContentDelta, Delta, ReasoningDelta

Json = dict[str, Any]
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class OutputItems:
    """The items of one response, in order. Owner: its builder.

    Invariant: at most the last item is open; every item that was added is closed before the next.
    """

    def __init__(self) -> None:
        self.items: list[Json] = []
        self._open: Json | None = None
        self._num_events = 0

    def event(self, kind: str, **fields: Any) -> Json:
        """Return an event with the next sequence number. Mutates."""
        number, self._num_events = self._num_events, self._num_events + 1
        return {"type": f"response.{kind}", "sequence_number": number, **fields}

    def add(self, deltas: Iterable[Delta]) -> list[Json]:
        """Take in deltas; return their events. Mutates."""
        events: list[Json] = []
        for delta in deltas:
            match delta:
                case ContentDelta(text):
                    events += self._add_text("message", text)
                case ReasoningDelta(text):
                    events += self._add_text("reasoning", text)
                case CallStart(_, call_id, name):
                    call = {"call_id": call_id, "name": name, "arguments": ""}
                    events += [*self.close(), self._begin("function_call", call)]
                case CallArguments(_, text):
                    assert self._open is not None
                    self._open["arguments"] += text
                    events.append(self._of_item("function_call_arguments.delta", delta=text))
        return events

    def close(self, status: str = "completed") -> list[Json]:
        """End the open item, if there is one; return the events of that. Mutates."""
        item = self._open
        if item is None:
            return []
        events = []
        if item["type"] == "function_call":
            arguments = item["arguments"]
            events.append(
                self._of_item(
                    "function_call_arguments.done", name=item["name"], arguments=arguments
                )
            )
        else:
            (part,) = item["content"]
            events.append(self._of_part(f"{part['type']}.done", text=part["text"]))
            events.append(self._of_part("content_part.done", part=dict(part)))
        item["status"] = status
        done = self.event("output_item.done", output_index=len(self.items) - 1, item=_copy(item))
        self._open = None
        return [*events, done]

    def _add_text(self, kind: str, text: str) -> list[Json]:
        events = []
        if self._open is None or self._open["type"] != kind:
            events += self.close() + self._begin_text(kind)
        assert self._open is not None
        (part,) = self._open["content"]
        part["text"] += text
        return [*events, self._of_part(f"{part['type']}.delta", delta=text)]

    def _begin_text(self, kind: str) -> list[Json]:
        is_message = kind == "message"
        fields: Json = {"role": "assistant"} if is_message else {"summary": []}
        began = self._begin(kind, {**fields, "content": []})
        part: Json = {"type": "output_text" if is_message else "reasoning_text", "text": ""}
        if is_message:
            part |= {"annotations": [], "logprobs": []}
        assert self._open is not None
        self._open["content"].append(part)
        return [began, self._of_part("content_part.added", part=dict(part))]

    def _begin(self, kind: str, fields: Json) -> Json:
        item_id = f"{PREFIXES[kind]}_{uuid.uuid4().hex}"
        self._open = {"id": item_id, "type": kind, "status": "in_progress", **fields}
        self.items.append(self._open)
        return self.event(
            "output_item.added", output_index=len(self.items) - 1, item=_copy(self._open)
        )

    def _of_item(self, kind: str, **fields: Any) -> Json:
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self.items) - 1}
        return self.event(kind, **place, **fields)

    def _of_part(self, kind: str, **fields: Any) -> Json:
        logprobs: Json = {"logprobs": []} if kind.startswith("output_text") else {}
        return self._of_item(kind, content_index=0, **fields, **logprobs)


def _copy(item: Json) -> Json:
    """Return an item as it is now: events are written later than they are made."""
    if "content" not in item:
        return dict(item)
    return {**item, "content": [dict(part) for part in item["content"]]}
