"""The two generating endpoints and the model list."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from dflash_wire.errors import ContextLengthError
from gateway.bad_words import add_bad_words
from gateway.body import read_model
from gateway.disconnect import until_disconnect
from gateway.generation import request_pieces
from gateway.metrics import GatewayMetrics
from gateway.parameters import check_parameters, ignored_fields_header
from gateway.responses import (
    ChatShape,
    CompletionShape,
    ResponseBuilder,
    ResponseHead,
    ResponseShape,
)
from gateway.schemas import (
    ChatCompletionBody,
    ChatMessage,
    CompletionBody,
    GenerationBody,
    Prompts,
    request_body_schema,
)
from gateway.sse import EventStreamResponse
from gateway.state import GatewaySettings, GatewayState, StateProvider
from gateway.validation import check_body, check_model, check_prompts, plan_sequences


def openai_router(provider: StateProvider, metrics: GatewayMetrics) -> APIRouter:
    """Return the routes under ``/v1``."""
    router = APIRouter(prefix="/v1", tags=["openai"])

    @router.post("/chat/completions", openapi_extra=request_body_schema(ChatCompletionBody))
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation."""
        arrived = metrics.clock()
        state = provider()
        body = await read_model(request, ChatCompletionBody, state.settings.max_body_bytes)
        ignored = check_parameters(body)
        check_body(body, state.settings)
        check_conversation(body.messages, state)
        messages = [message.for_template() for message in body.messages]
        prompt = await state.tokenizer.encode_chat(messages, body.enables_thinking)
        answer = _Answer(request, state, metrics, arrived, ChatShape(), ignored)
        return await answer.respond(body, [prompt], "messages")

    @router.post("/completions", openapi_extra=request_body_schema(CompletionBody))
    async def create_completion(request: Request) -> Response:
        """Continue one or several prompts."""
        arrived = metrics.clock()
        state = provider()
        body = await read_model(request, CompletionBody, state.settings.max_body_bytes)
        ignored = check_parameters(body)
        check_body(body, state.settings)
        check_prompts(body.prompt, state.settings)
        prompts = await _encode_prompts(state, body.prompt)
        answer = _Answer(request, state, metrics, arrived, CompletionShape(), ignored)
        return await answer.respond(body, prompts, "prompt")

    @router.get("/models")
    async def list_models() -> Response:
        """List the one model served here."""
        model = model_object(provider().settings)
        return JSONResponse({"object": "list", "data": [model]})

    @router.get("/models/{model_id:path}")
    async def retrieve_model(model_id: str) -> Response:
        """Describe the model."""
        settings = provider().settings
        check_model(model_id, settings)
        return JSONResponse(model_object(settings))

    return router


def model_object(settings: GatewaySettings) -> dict[str, Any]:
    """Return OpenAI's model object; ``max_model_len`` is vLLM's name for the context."""
    return {
        "id": settings.model_id,
        "object": "model",
        "created": settings.created,
        "owned_by": settings.owned_by,
        "max_model_len": settings.max_context,
    }


def check_conversation(messages: Sequence[ChatMessage], state: GatewayState) -> None:
    """Raise ``ContextLengthError`` for what cannot fit, before it is rendered and encoded."""
    max_context = state.settings.max_context
    if len(messages) > max_context:  # each is at least one token
        raise ContextLengthError(
            f"{len(messages)} messages are more than this model's context of {max_context} tokens "
            "can hold; send fewer.",
            "messages",
        )
    num_chars = sum(len(message.content) for message in messages)
    state.tokenizer.check_length(num_chars, max_context, "messages")


async def _encode_prompts(state: GatewayState, prompts: Prompts) -> list[list[int]]:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    for text in texts:
        state.tokenizer.check_length(len(text), state.settings.max_context, "prompt")
    if texts:
        return await state.tokenizer.encode_texts(texts)
    return [prompt for prompt in prompts if isinstance(prompt, list)]


class _Answer:
    """The common end of both generating endpoints. Owner: one HTTP request."""

    def __init__(
        self,
        request: Request,
        state: GatewayState,
        metrics: GatewayMetrics,
        arrived: float,
        shape: ResponseShape,
        ignored: list[str],
    ) -> None:
        self._request = request
        self._state = state
        self._metrics = metrics
        self._arrived = arrived
        self._shape = shape
        self._headers = ignored_fields_header(ignored)

    async def respond(
        self, body: GenerationBody, prompt_token_ids: list[list[int]], prompt_param: str
    ) -> Response:
        """Generate and return the response, or a response that generates while it streams."""
        settings = self._state.settings
        response_id = f"{self._shape.id_prefix}-{uuid.uuid4().hex}"
        plans = plan_sequences(body, prompt_token_ids, settings, response_id, prompt_param)
        plans = add_bad_words(plans, body.bad_words or (), self._state.tokenizer)
        builder = ResponseBuilder(
            ResponseHead(response_id, settings.model_id, settings.system_fingerprint),
            self._shape,
            plans,
            settings.default_policy,
            wants_stats=body.wants_stats,
            wants_usage_chunk=body.wants_usage_chunk,
        )
        pieces = request_pieces(self._state, plans, self._metrics, self._arrived)
        if body.stream:
            request_id = self._request.state.request_id
            events = builder.events(pieces)
            return EventStreamResponse(events, self._metrics, request_id, self._headers)
        whole = await until_disconnect(self._request.receive, builder.whole(pieces))
        return JSONResponse(whole, headers=self._headers)
