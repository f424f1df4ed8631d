"""Response objects for requests with more than text: token ids, log-probabilities, reasoning, tool calls."""

from __future__ import annotations

from typing import Any

from gateway.chat_deltas import delta_object, parsed_message
from gateway.chat_tokenizer import ChatTokenizer
from gateway.details import PieceDetail, TokenEntry
from gateway.framing import PLACE, TextFiller
from gateway.generation import TextPiece
from gateway.logprobs import prompt_logprobs
from gateway.parsers.deltas import CallStart, Delta
from gateway.responses import ChoiceSoFar, Json, ResponseBuilder


class DetailedBuilder(ResponseBuilder):
    """A ``ResponseBuilder`` for pieces with details. Owner: one HTTP request.

    Args:
        wants_running_usage: every chunk carries the usage so far, of all choices.
        tokenizer: names tokens.
        others: those of ``ResponseBuilder``.
    """

    def __init__(
        self, *others: Any, wants_running_usage: bool, tokenizer: ChatTokenizer, **more: Any
    ) -> None:
        super().__init__(*others, **more)
        self._wants_running_usage = wants_running_usage
        self._token_ids: list[list[int]] = [[] for _ in self._plans]
        self._entries: list[list[TokenEntry]] = [[] for _ in self._plans]
        self._prompts: list[list[Json | None] | None] = [None for _ in self._plans]
        self._tokenizer = tokenizer
        self._logprobs = [self._shape.logprobs(tokenizer) for _ in self._plans]
        self._deltas: list[list[Delta]] = [[] for _ in self._plans]
        self._num_reasoning_tokens = [0 for _ in self._plans]
        self._delta_templates: dict[tuple[Any, ...], TextFiller] = {}
        self._has_begun = [False for _ in self._plans]

    def _take_detail(self, piece: TextPiece) -> None:
        index, detail = piece.choice_index, piece.detail
        if detail is not None:
            self._token_ids[index] += detail.token_ids
            self._entries[index] += detail.logprobs
            self._deltas[index] += detail.deltas
            self._num_reasoning_tokens[index] = detail.num_reasoning_tokens
            self._take_prompt(index, detail)

    def _take_prompt(self, index: int, detail: PieceDetail) -> bool:
        """Keep what is said about a prompt, once; return whether there was anything. Mutates."""
        said = detail.prompt_logprobs
        if said is None:
            return False
        num_top = self._plans[index].request.num_prompt_logprobs or 0
        self._prompts[index] = prompt_logprobs(self._prompt(index), said, num_top, self._tokenizer)
        return True

    def _whole_choice(self, index: int, choice: ChoiceSoFar) -> Json:
        made = super()._whole_choice(index, choice)
        if self._plans[index].request.num_logprobs is not None:
            made["logprobs"] = self._logprobs[index].of(self._entries[index])
        if self._plans[index].returns_token_ids:
            made["token_ids"] = self._token_ids[index]
            if self._shape.has_ids_per_choice:
                made["prompt_token_ids"] = self._prompt(index)
        if self._prompts[index] is not None and self._shape.has_ids_per_choice:
            made["prompt_logprobs"] = self._prompts[index]
        if self._plans[index].parse is not None:
            made["message"] |= parsed_message(self._deltas[index])
        return made

    def _whole_extras(self) -> Json:
        extras = self._prompt_of_response()
        if self._prompts[0] is not None and not self._shape.has_ids_per_choice:
            extras["prompt_logprobs"] = self._prompts[0]
        return extras

    def _opening_chunk(self, choice: Json) -> Json:
        return self._chunk(choice) | self._prompt_of_response()

    def _text_event(self, piece: TextPiece) -> bytes:
        self._choices[piece.choice_index].num_tokens = piece.num_tokens
        if piece.detail is not None:
            self._num_reasoning_tokens[piece.choice_index] = piece.detail.num_reasoning_tokens
            is_parsed = self._plans[piece.choice_index].parse is not None
            if is_parsed and piece.detail.has_only_deltas and not self._wants_running_usage:
                events = (self._delta_event(piece.choice_index, d) for d in piece.detail.deltas)
                return b"".join(events)
        return b"".join(self._chunk_event(choice) for choice in self._added_choices(piece))

    def _delta_event(self, index: int, delta: Delta) -> bytes:
        """Return the event of one delta: of those that add text, all else is the same every time."""
        if isinstance(delta, CallStart):
            return self._chunk_event(self._delta_choice(index, delta))
        key = (index, type(delta), delta[:-1])  # tuples of different types may be equal
        template = self._delta_templates.get(key)
        if template is None:
            sample = self._chunk(self._delta_choice(index, delta._replace(text=PLACE)))
            template = self._delta_templates[key] = self._framing.text_template(sample)
        return template.fill(delta.text)

    def _added_choices(self, piece: TextPiece) -> list[Json]:
        """Return the stream choices of what ``piece`` adds; all but text is in the first. Mutates."""
        index, detail = piece.choice_index, piece.detail
        choices = [self._shape.text_choice(index, piece.text)] if piece.text else []
        if detail is not None:
            choices += [self._delta_choice(index, delta) for delta in detail.deltas]
        if detail is not None and (detail.token_ids or detail.logprobs):
            choices = choices or [self._shape.text_choice(index, "")]
        if detail is not None and self._take_prompt(index, detail):
            choices = choices or [self._shape.text_choice(index, "")]
            choices[0]["prompt_logprobs"] = self._prompts[index]
        if detail is not None and detail.logprobs:
            choices[0]["logprobs"] = self._logprobs[index].of(detail.logprobs)
        if detail is not None and detail.token_ids:
            choices[0]["token_ids"] = list(detail.token_ids)
            if self._shape.has_ids_per_choice and not self._has_begun[index]:
                self._has_begun[index] = True
                choices[0]["prompt_token_ids"] = self._prompt(index)
        return choices

    def _delta_choice(self, index: int, delta: Delta) -> Json:
        return self._shape.text_choice(index, "") | {"delta": delta_object(delta)}

    def _chunk(self, choice: Json) -> Json:
        chunk = super()._chunk(choice)
        if self._wants_running_usage:
            usage = self.usage()
            del usage["prompt_tokens_details"]  # the last chunk's: known when a sequence has ended
            chunk["usage"] = usage
        return chunk

    def usage(self) -> Json:
        """See ``ResponseBuilder``; with reasoning tokens where reasoning is parsed."""
        usage = super().usage()
        if any(plan.parse is not None and plan.parse.reasoning for plan in self._plans):
            num_tokens = sum(self._num_reasoning_tokens)
            usage["completion_tokens_details"] = {"reasoning_tokens": num_tokens}
        return usage

    def _prompt_of_response(self) -> Json:
        if self._shape.has_ids_per_choice or not self._plans[0].returns_token_ids:
            return {}
        return {"prompt_token_ids": self._prompt(0)}

    def _prompt(self, index: int) -> list[int]:
        return self._plans[index].request.prompt_token_ids
