"""OpenAI's response objects, built from text pieces: whole, or as stream events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from dflash_wire.records import GenerationStats
from gateway.framing import PLACE, Framing, TextFiller
from gateway.generation import TextPiece, TextPieces
from gateway.logprobs import ChatLogprobs, CompletionLogprobs, LogprobsWriter
from gateway.validation import SequencePlan, drafter_label

Json = dict[str, Any]


class ResponseShape(Protocol):
    """Where chat and text completions differ."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    has_ids_per_choice: bool
    """Whether ``prompt_token_ids`` belong to choices, not to the response."""
    logprobs: type[LogprobsWriter]

    def whole_choice(self, index: int, text: str, finish_reason: str | None) -> Json:
        """Return one choice of a whole response."""

    def opening_choice(self, index: int) -> Json | None:
        """Return the choice that opens a stream, if there is one."""

    def text_choice(self, index: int, text: str) -> Json:
        """Return a stream choice that adds ``text``."""

    def finish_choice(self, index: int, finish_reason: str) -> Json:
        """Return a stream choice that ends ``index``."""


class ChatShape:
    """``chat.completion``."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    has_ids_per_choice = False
    logprobs: type[LogprobsWriter] = ChatLogprobs

    def whole_choice(self, index: int, text: str, finish_reason: str | None) -> Json:
        """Return a choice with an assistant message."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": None,
            "finish_reason": finish_reason,
        }

    def opening_choice(self, index: int) -> Json | None:
        """Return the delta that names the role."""
        return self._delta(index, {"role": "assistant", "content": ""})

    def text_choice(self, index: int, text: str) -> Json:
        """Return a delta with content."""
        return self._delta(index, {"content": text})

    def finish_choice(self, index: int, finish_reason: str) -> Json:
        """Return an empty delta with the finish reason."""
        return self._delta(index, {}, finish_reason)

    def _delta(self, index: int, delta: Json, finish_reason: str | None = None) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


class CompletionShape:
    """``text_completion``."""

    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    has_ids_per_choice = True
    logprobs: type[LogprobsWriter] = CompletionLogprobs

    def whole_choice(self, index: int, text: str, finish_reason: str | None) -> Json:
        """Return a choice with all of its text."""
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}

    def opening_choice(self, index: int) -> Json | None:
        """Return nothing: text completions have no role."""
        return None

    def text_choice(self, index: int, text: str) -> Json:
        """Return a choice with the text that is new."""
        return self.whole_choice(index, text, None)

    def finish_choice(self, index: int, finish_reason: str) -> Json:
        """Return a choice without text, but with the finish reason."""
        return self.whole_choice(index, "", finish_reason)


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What is the same in every object of one response."""

    response_id: str
    model: str
    system_fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))

    def object(self, kind: str, choices: list[Json]) -> Json:
        """Return a response object or stream chunk of ``kind``."""
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
        }


@dataclass(slots=True)
class ChoiceSoFar:
    """One choice while its pieces come in."""

    text: list[str] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: str | None = None
    stats: GenerationStats = field(default_factory=GenerationStats)

    def end(self, piece: TextPiece) -> None:
        """Take in its last piece. Mutates."""
        self.num_tokens = piece.num_tokens
        self.finish_reason = piece.finish_reason
        self.stats = piece.stats or self.stats


class ResponseBuilder:
    """Builds one response from the pieces of its sequences. Owner: one HTTP request.

    Args:
        default_policy: what the engine applies to sequences that name no policy.
        wants_stats: add the ``dflash`` object.
        wants_usage_chunk: end a stream with a chunk that holds the usage.
        framing: how stream events are written.
    """

    def __init__(
        self,
        head: ResponseHead,
        shape: ResponseShape,
        plans: Sequence[SequencePlan],
        default_policy: str,
        wants_stats: bool,
        wants_usage_chunk: bool,
        framing: Framing,
    ) -> None:
        self._head = head
        self._shape = shape
        self._plans = plans
        self._default_policy = default_policy
        self._wants_stats = wants_stats
        self._wants_usage_chunk = wants_usage_chunk
        self._framing = framing
        self._choices = [ChoiceSoFar() for _ in plans]
        self._text_templates: list[TextFiller | None] = [None] * len(plans)

    async def whole(self, pieces: TextPieces) -> Json:
        """Return the whole response; mutates, so call once."""
        async with aclosing(pieces):
            async for piece in pieces:
                self.take(piece)
        choices = [self._whole_choice(*item) for item in enumerate(self._choices)]
        response = self._head.object(self._shape.whole_object, choices)
        response["usage"] = self.usage()
        response |= self._whole_extras()
        if self._wants_stats:
            response["dflash"] = self._stats()
        return response

    def take(self, piece: TextPiece) -> None:
        """Take in a piece of an answer that is not written as stream events. Mutates."""
        self._choices[piece.choice_index].text.append(piece.text)
        self._take_detail(piece)
        if piece.finish_reason is not None:
            self._choices[piece.choice_index].end(piece)

    def wanted_stats(self) -> Json | list[Json] | None:
        """Return the ``dflash`` object, one per choice if there are several; None if nobody wants it."""
        return self._stats() if self._wants_stats else None

    async def events(self, pieces: TextPieces) -> AsyncGenerator[bytes, None]:
        """Yield the response as stream events, one write per piece; mutates, so call once."""
        num_running = len(self._choices)
        opening = self._opening()
        async with aclosing(pieces):
            async for piece in pieces:
                if piece.finish_reason is None:
                    yield opening + self._text_event(piece)
                else:
                    self._choices[piece.choice_index].end(piece)
                    num_running -= 1
                    yield opening + self._last_events(piece, is_last=num_running == 0)
                opening = b""
        if self._wants_usage_chunk:
            yield self._usage_event() + self._framing.done
        else:
            yield self._framing.done

    def _take_detail(self, piece: TextPiece) -> None:
        """Keep what a piece of a whole response carries beside its text: nothing, in this class."""

    def _whole_choice(self, index: int, choice: ChoiceSoFar) -> Json:
        return self._shape.whole_choice(index, "".join(choice.text), choice.finish_reason)

    def _whole_extras(self) -> Json:
        """Return fields of a whole response that only some requests ask for."""
        return {}

    def _opening_chunk(self, choice: Json) -> Json:
        return self._chunk(choice)

    def _opening(self) -> bytes:
        choices = (self._shape.opening_choice(index) for index in range(len(self._choices)))
        chunks = (self._opening_chunk(choice) for choice in choices if choice is not None)
        head = self._framing.head(self._head.object(self._shape.chunk_object, []))
        return head + b"".join(map(self._framing.event, chunks))

    def _text_event(self, piece: TextPiece) -> bytes:
        """Return the event that adds ``piece.text``: all of it but the text is the same every time."""
        template = self._text_templates[piece.choice_index]
        if template is None:
            sample = self._chunk(self._shape.text_choice(piece.choice_index, PLACE))
            template = self._framing.text_template(sample)
            self._text_templates[piece.choice_index] = template
        return template.fill(piece.text)

    def _last_events(self, piece: TextPiece, is_last: bool) -> bytes:
        has_news = piece.text or piece.detail is not None
        events = self._text_event(piece) if has_news else b""
        choice = self._shape.finish_choice(piece.choice_index, str(piece.finish_reason))
        carries_stats = is_last and self._wants_stats and not self._wants_usage_chunk
        return events + self._chunk_event(choice, carries_stats)

    def _chunk(self, choice: Json) -> Json:
        chunk = self._head.object(self._shape.chunk_object, [choice])
        if self._wants_usage_chunk:
            chunk["usage"] = None
        return chunk

    def _chunk_event(self, choice: Json, carries_stats: bool = False) -> bytes:
        chunk = self._chunk(choice)
        if carries_stats:
            chunk["dflash"] = self._stats()
        return self._framing.event(chunk)

    def _usage_event(self) -> bytes:
        chunk = self._head.object(self._shape.chunk_object, [])
        chunk["usage"] = self.usage()
        if self._wants_stats:
            chunk["dflash"] = self._stats()
        return self._framing.event(chunk)

    def usage(self) -> Json:
        """Return what all choices have used so far."""
        # A prompt counts once, however many choices it has.
        prompts = [plan for plan in self._plans if plan.is_first_choice]
        num_prompt = sum(len(plan.request.prompt_token_ids) for plan in prompts)
        num_completion = sum(choice.num_tokens for choice in self._choices)
        num_cached = sum(self._choices[plan.index].stats.num_cached_tokens for plan in prompts)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def _stats(self) -> Json | list[Json]:
        stats = [
            stats_object(plan, choice.stats, self._default_policy)
            for plan, choice in zip(self._plans, self._choices, strict=True)
        ]
        return stats[0] if len(stats) == 1 else stats


def stats_object(plan: SequencePlan, stats: GenerationStats, default_policy: str) -> Json:
    """Return the ``dflash`` object of one sequence."""
    # The engine's default may have been changed; only its first chunk says what it applied.
    policy = stats.policy or plan.request.policy or default_policy
    drafter = drafter_label(policy, plan.request.drafter)
    values = {name: getattr(stats, name) for name in _STATS_FIELDS}
    sampling = plan.request.sampling
    mode = {"sampling": "rejection"} if sampling.samples_drafts else {}
    return {"policy": policy, "drafter": drafter, "seed": sampling.seed, **mode, **values}


_STATS_FIELDS = (
    "num_cycles",
    "num_draft_tokens",
    "num_accepted_drafts",
    "acceptance_length",
    "committed_per_cycle",
    "draft_ms",
    "verify_ms",
    "overhead_ms",
)
