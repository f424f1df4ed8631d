"""The two generating endpoints and the model list."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from gateway.answers import make_builder
from gateway.body import read_model
from gateway.disconnect import until_disconnect
from gateway.generation import request_pieces
from gateway.metrics import GatewayMetrics
from gateway.msgpack_framing import choose_framing, object_response
from gateway.openapi import answering, generating
from gateway.parameters import ignored_fields_header
from gateway.preparation import Prepared, new_response_id, prepare_chat, prepare_completion
from gateway.responses import ChatShape, CompletionShape, ResponseShape
from gateway.schemas import (
    ChatCompletionBody,
    CompletionBody,
    GenerationBody,
)
from gateway.sse import EventStreamResponse
from gateway.state import GatewaySettings, GatewayState, StateProvider
from gateway.validation import check_model


def openai_router(provider: StateProvider, metrics: GatewayMetrics) -> APIRouter:
    """Return the routes under ``/v1``."""
    router = APIRouter(prefix="/v1", tags=["openai"])

    @router.post("/chat/completions", **generating("ChatCompletion", ChatCompletionBody))
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation."""
        arrived = metrics.clock()
        state = provider()
        body = await read_model(request, ChatCompletionBody, state.settings.max_body_bytes)
        prepared = await prepare_chat(state, body, new_response_id(ChatShape.id_prefix))
        answer = _Answer(request, state, metrics, arrived, ChatShape())
        return await answer.respond(body, prepared)

    @router.post("/completions", **generating("Completion", CompletionBody))
    async def create_completion(request: Request) -> Response:
        """Continue one or several prompts."""
        arrived = metrics.clock()
        state = provider()
        body = await read_model(request, CompletionBody, state.settings.max_body_bytes)
        prepared = await prepare_completion(state, body, new_response_id(CompletionShape.id_prefix))
        answer = _Answer(request, state, metrics, arrived, CompletionShape())
        return await answer.respond(body, prepared)

    @router.get("/models", **answering("Models", errors=[503]))
    async def list_models() -> Response:
        """List the one model served here."""
        model = model_object(provider().settings)
        return JSONResponse({"object": "list", "data": [model]})

    @router.get("/models/{model_id:path}", **answering("Model", errors=[404, 503]))
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


class _Answer:
    """The common end of both generating endpoints. Owner: one HTTP request."""

    def __init__(
        self,
        request: Request,
        state: GatewayState,
        metrics: GatewayMetrics,
        arrived: float,
        shape: ResponseShape,
    ) -> None:
        self._request = request
        self._state = state
        self._metrics = metrics
        self._arrived = arrived
        self._shape = shape

    async def respond(self, body: GenerationBody, prepared: Prepared) -> Response:
        """Generate and return the response, or a response that generates while it streams."""
        accept = self._request.headers.get("accept")
        framing = choose_framing(accept)
        headers = ignored_fields_header(prepared.ignored)
        builder = make_builder(self._state, body, prepared, self._shape, framing)
        pieces = request_pieces(self._state, prepared.plans, self._metrics, self._arrived)
        if body.stream:
            request_id = self._request.state.request_id
            events = builder.events(pieces)
            return EventStreamResponse(events, framing, self._metrics, request_id, headers)
        whole = await until_disconnect(self._request.receive, builder.whole(pieces))
        return object_response(whole, accept, headers=headers)
