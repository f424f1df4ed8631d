"""Builds ``/v1/responses`` answers from text pieces: whole, or as named events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from dflash_wire.records import FinishReason, GenerationStats
from gateway.framing import Framing, SseFraming
from gateway.generation import TextPiece, TextPieces
from gateway.parsers.deltas import ContentDelta, Delta
from gateway.response_items import Json, OutputItems
from gateway.responses import stats_object
from gateway.responses_body import ResponsesBody
from gateway.state import GatewaySettings
from gateway.validation import SequencePlan


class NamedSseFraming(SseFraming):
    """Server-sent events that say their type twice, as this API's do. Its streams end without ``[DONE]``:
    ``response.completed`` or ``response.incomplete`` is the last event of a stream that is complete."""

    done = b""

    def event(self, data: Mapping[str, Any]) -> bytes:
        """Return one event under its type's name."""
        named = data if "type" in data else {**data.get("error", {}), "type": "error", **data}
        return f"event: {named['type']}\n".encode() + super().event(named)


class ResponsesBuilder:
    """Builds one response. Owner: one HTTP request.

    Args:
        body: what was asked, for what a response repeats of it.
        plan: of its only sequence.
        wants_stats: add the ``dflash`` object.
    """

    def __init__(
        self,
        response_id: str,
        body: ResponsesBody,
        plan: SequencePlan,
        settings: GatewaySettings,
        framing: Framing,
        wants_stats: bool,
    ) -> None:
        self._plan = plan
        self._settings = settings
        self._framing = framing
        self._wants_stats = wants_stats
        self._items = OutputItems()
        self._last: TextPiece | None = None
        self._response = _empty_response(response_id, body, plan, settings)

    async def whole(self, pieces: TextPieces) -> Json:
        """Return the whole response; mutates, so call once."""
        async with aclosing(pieces):
            async for piece in pieces:
                self._take(piece)
        return self._finished()

    async def events(self, pieces: TextPieces) -> AsyncGenerator[bytes, None]:
        """Yield the response as stream events, one write per piece; mutates, so call once."""
        opening = [
            self._items.event(kind, response=self._response) for kind in ("created", "in_progress")
        ]
        async with aclosing(pieces):
            async for piece in pieces:
                yield self._written(opening + self._take(piece))
                opening = []
        response = self._finished()
        last = self._items.event(response["status"], response=response)
        yield self._written([*opening, last]) + self._framing.done

    def _written(self, events: list[Json]) -> bytes:
        return b"".join(map(self._framing.event, events))

    def _take(self, piece: TextPiece) -> list[Json]:
        """Take in a piece; return its events. Mutates."""
        events = self._items.add(self._deltas(piece))
        if piece.finish_reason is not None:
            self._last = piece
            events += self._items.close(_status(piece))
        return events

    def _deltas(self, piece: TextPiece) -> list[Delta]:
        if self._plan.parse is not None:
            return list(piece.detail.deltas) if piece.detail is not None else []
        return [ContentDelta(piece.text)] if piece.text else []

    def _finished(self) -> Json:
        last = self._last
        assert last is not None  # pieces end with a finish reason or with an error
        status = _status(last)
        stats = last.stats or GenerationStats()
        response = {**self._response, "status": status, "output": self._items.items}
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["usage"] = self._usage(last, stats)
        if self._wants_stats:
            policy = self._settings.default_policy
            response["dflash"] = stats_object(self._plan, stats, policy)
        return response

    def _usage(self, last: TextPiece, stats: GenerationStats) -> Json:
        num_input = len(self._plan.request.prompt_token_ids)
        num_reasoning = last.detail.num_reasoning_tokens if last.detail is not None else 0
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": stats.num_cached_tokens},
            "output_tokens": last.num_tokens,
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": num_input + last.num_tokens,
        }


def _status(piece: TextPiece) -> str:
    return "incomplete" if piece.finish_reason == FinishReason.LENGTH else "completed"


def _empty_response(
    response_id: str, body: ResponsesBody, plan: SequencePlan, settings: GatewaySettings
) -> Json:
    sampling = plan.request.sampling
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": settings.model_id,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": sampling.temperature,
        "text": {"format": (body.text and body.text.format) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }
