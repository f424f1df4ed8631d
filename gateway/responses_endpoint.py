"""``POST /v1/responses``: the stateless part of OpenAI's newer API, over the same path as chat."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from dflash_wire.errors import InvalidRequestError
from gateway.body import read_model
from gateway.disconnect import until_disconnect
from gateway.framing import Framing
from gateway.generation import request_pieces
from gateway.metrics import GatewayMetrics
from gateway.msgpack_framing import MsgpackFraming, accepts_msgpack, object_response
from gateway.openapi import generating
from gateway.parameters import ignored_fields_header
from gateway.preparation import Prepared, new_response_id, prepare_chat
from gateway.response_builder import NamedSseFraming, ResponsesBuilder
from gateway.responses_body import ResponsesBody, as_chat, renamed
from gateway.sse import EventStreamResponse
from gateway.state import GatewayState, StateProvider


def responses_router(provider: StateProvider, metrics: GatewayMetrics) -> APIRouter:
    """Return the route."""
    router = APIRouter(prefix="/v1", tags=["openai"])

    @router.post("/responses", **generating("Response", ResponsesBody))
    async def create_response(request: Request) -> Response:
        """Answer a conversation with text, reasoning and tool calls."""
        arrived = metrics.clock()
        state = provider()
        body = await read_model(request, ResponsesBody, state.settings.max_body_bytes)
        prepared = await _prepare(state, body)
        accept = request.headers.get("accept")
        framing: Framing = MsgpackFraming() if accepts_msgpack(accept) else NamedSseFraming()
        wants_stats = body.dflash is not None and bool(body.dflash.stats)
        builder = ResponsesBuilder(
            *(prepared.response_id, body, prepared.plans[0], state.settings, framing),
            wants_stats=wants_stats,
        )
        headers = ignored_fields_header(prepared.ignored)
        pieces = request_pieces(state, prepared.plans, metrics, arrived)
        if body.stream:
            request_id = request.state.request_id
            events = builder.events(pieces)
            return EventStreamResponse(events, framing, metrics, request_id, headers)
        whole = await until_disconnect(request.receive, builder.whole(pieces))
        return object_response(whole, accept, headers=headers)

    return router


async def _prepare(state: GatewayState, body: ResponsesBody) -> Prepared:
    try:
        return await prepare_chat(state, as_chat(body), new_response_id("resp"))
    except InvalidRequestError as error:
        raise renamed(error) from error
