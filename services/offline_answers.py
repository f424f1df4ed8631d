"""From a row of an offline batch to its answer, over the gateway's own path.

A row is the body of a chat or text completion, so it may say what such a request may say, and is refused
where that is refused. What it leaves out the command line says.
"""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any, Protocol, cast

from pydantic import ValidationError

from dflash_wire.errors import InvalidRequestError
from dflash_wire.ports import EngineLimits, EnginePort
from dflash_wire.records import GenerationRequest, TokenChunk
from gateway.answers import make_builder
from gateway.body import describe
from gateway.chat_tokenizer import ChatTokenizer
from gateway.errors import UnsupportedParameterError
from gateway.framing import SseFraming
from gateway.generation import request_pieces
from gateway.metrics import GatewayMetrics
from gateway.parameters import is_neutral
from gateway.preparation import Prepared, prepare_chat, prepare_completion
from gateway.processors import check_min_tokens
from gateway.responses import ChatShape, CompletionShape, ResponseShape
from gateway.schemas import ChatCompletionBody, CompletionBody, DFlashOptions, GenerationBody
from gateway.state import GatewaySettings, GatewayState, GrammarCheck

Json = dict[str, Any]
INPUTS = ("messages", "prompt", "question")
"""Of a row with several the first counts. The last is one user's turn."""
NOT_TOLD = ("stream", "stream_options")
MORE = ("logprobs", "token_ids", "prompt_token_ids", "prompt_logprobs")
"""Fields of a choice, or of the answer, that rows have if they asked for them."""


class BatchEngine(Protocol):
    """What a batch needs of ``LocalEngine``."""

    limits: EngineLimits

    def generate(self, request: GenerationRequest) -> Iterator[TokenChunk]:
        """Yield chunks until one carries a finish reason; called from several threads."""

    def close(self) -> None:
        """End all requests."""


class OwnLoopEngine:
    """``EnginePort`` as far as answers need it, for an event loop that has one row to answer.

    Waiting for the engine blocks the loop. Several choices of a row take turns: the engine runs them at the
    same time and keeps their chunks.
    """

    def __init__(self, engine: BatchEngine) -> None:
        self._engine = engine

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        """Yield the engine's chunks; closing it early cancels the request."""
        chunks = self._engine.generate(request)
        with closing(cast("Any", chunks)):
            for chunk in chunks:
                yield chunk


class RowAnswerer:
    """Answers rows, from any thread. Keeps nothing of one.

    Args:
        defaults: fields of a body, for rows that are silent about them.
        max_tokens: of rows that name no limit, as far as the context allows it.
        grammar_check: see ``one_at_a_time``; None: rows cannot demand a form.
    """

    def __init__(
        self,
        engine: BatchEngine,
        tokenizer: ChatTokenizer,
        settings: GatewaySettings,
        defaults: Mapping[str, Any],
        max_tokens: int,
        grammar_check: GrammarCheck | None = None,
    ) -> None:
        port = cast(
            "EnginePort", OwnLoopEngine(engine)
        )  # nothing but ``generate`` is asked of it here
        self._state = GatewayState(port, tokenizer, settings, grammar_check=grammar_check)
        self._metrics = GatewayMetrics()
        self._defaults = {"model": settings.model_id, **defaults}
        self._max_tokens = max_tokens

    async def answer(self, row_id: str, row: Mapping[str, Any]) -> Json:
        """Return the output row of ``row``, without its id.

        Raises:
            DFlashError: the row is refused, or the engine failed.
        """
        body = row_body(row, self._defaults)
        shape: ResponseShape
        if isinstance(body, ChatCompletionBody):
            shape, prepared = ChatShape(), await prepare_chat(self._state, body, row_id)
        else:
            shape, prepared = CompletionShape(), await prepare_completion(self._state, body, row_id)
        prepared = self._bounded(prepared, body)
        options = (body.dflash or DFlashOptions()).model_copy(update={"stats": True})
        counted = body.model_copy(update={"dflash": options})
        builder = make_builder(self._state, counted, prepared, shape, SseFraming())
        arrived = self._metrics.clock()
        pieces = request_pieces(self._state, prepared.plans, self._metrics, arrived)
        return output_row(await builder.whole(pieces), body)

    def _bounded(self, prepared: Prepared, body: GenerationBody) -> Prepared:
        """Return plans within the command line's limit, if the row has none of its own."""
        if body.max_tokens is not None or body.max_completion_tokens is not None:
            return prepared
        plans = []
        for plan in prepared.plans:
            most = min(plan.request.max_tokens, self._max_tokens)
            check_min_tokens(body, most)
            plans.append(replace(plan, request=replace(plan.request, max_tokens=most)))
        return replace(prepared, plans=plans)


def one_at_a_time(check: GrammarCheck) -> GrammarCheck:
    """Return a ``check`` that belongs to one event loop for those of several threads, a row's each."""
    lock = threading.Lock()

    async def locked(text: str) -> str | None:
        with lock:  # the others have nothing else to do in their loops
            return await check(text)

    return locked


def row_body(
    row: Mapping[str, Any], defaults: Mapping[str, Any]
) -> ChatCompletionBody | CompletionBody:
    """Return the request that ``row`` is.

    Raises:
        InvalidRequestError: it asks nothing, or a field has a wrong value.
        UnsupportedParameterError: it asks for a stream.
    """
    kind = next((name for name in INPUTS if row.get(name) is not None), None)
    if kind is None:
        raise InvalidRequestError("The row has none of messages, prompt, question; add one.")
    model = CompletionBody if kind == "prompt" else ChatCompletionBody
    fields = {**defaults, **_clean_fields(row, kind, model)}
    for name in NOT_TOLD:
        if not is_neutral(fields.pop(name, None), (False,)):
            raise UnsupportedParameterError(f"{name} is not supported in a batch.", name)
    if kind == "question":
        if not isinstance(row[kind], str):
            raise InvalidRequestError("question: must be a string.", kind)
        fields["messages"] = [{"role": "user", "content": row[kind]}]
    try:
        return model.model_validate_json(json.dumps(fields))
    except ValidationError as error:
        raise describe(error) from error


def _clean_fields(row: Mapping[str, Any], kind: str, model: type[GenerationBody]) -> Json:
    """Return the fields of a body. What a row has for others may be anything, and is left out if it is."""
    fields: Json = {}
    for name, value in row.items():
        if name == "id" or (name in INPUTS and name != kind) or value is None:
            continue
        try:
            _check_characters(value, name)
        except InvalidRequestError:
            if name in model.model_fields or name == kind:
                raise
            continue
        if name != "question":
            fields[name] = value
    return fields


def _check_characters(value: object, param: str) -> None:
    """Refuse half surrogate pairs at any depth: neither pydantic nor a tokenizer takes them."""
    try:
        is_clean = not has_surrogate(json.dumps(value, ensure_ascii=False))
    except RecursionError:
        raise InvalidRequestError(f"{param} is nested too deeply.", param) from None
    if not is_clean:
        raise InvalidRequestError(
            f"{param} has half a surrogate pair, which is no character; remove it.", param
        )


def has_surrogate(text: str) -> bool:
    """Whether ``text`` holds half of a character."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def output_row(answer: Json, body: GenerationBody) -> Json:
    """Return what a row of the output says of ``answer``; its text is the first choice's."""
    first, usage, stats = answer["choices"][0], answer["usage"], answer.pop("dflash")
    cycles = [n for one in _listed(stats) for n in one["committed_per_cycle"]]
    row = {
        "text": _text(first),
        "finish_reason": first["finish_reason"],
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "acceptance_length": round(sum(cycles) / len(cycles), 3) if cycles else 0.0,
    }
    for name in ("reasoning_content", "tool_calls"):
        if first.get("message", {}).get(name) is not None:
            row[name] = first["message"][name]
    row |= {
        name: found for name in MORE if (found := first.get(name, answer.get(name))) is not None
    }
    if len(answer["choices"]) > 1:
        row["choices"] = answer["choices"]
    if body.wants_stats:
        row["dflash"] = stats
    return row


def _listed(stats: Json | list[Json]) -> list[Json]:
    return stats if isinstance(stats, list) else [stats]


def _text(choice: Json) -> str:
    message = choice.get("message")
    return str(choice["text"] if message is None else message["content"] or "")
