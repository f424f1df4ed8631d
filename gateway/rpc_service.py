"""The gRPC service over the same path as the HTTP endpoints; knows neither a server nor Ray."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

import grpc

from dflash_wire.errors import DFlashError
from dflash_wire.v1 import generation_pb2 as pb
from gateway.answers import make_builder
from gateway.chat_tokenizer import ChatTokenizer
from gateway.framing import SseFraming
from gateway.generation import TextPiece, request_pieces
from gateway.metrics import GatewayMetrics
from gateway.preparation import Prepared, new_response_id, prepare_chat, prepare_completion
from gateway.responses import ChatShape, CompletionShape, ResponseBuilder, ResponseShape
from gateway.rpc_bodies import (
    add_delta,
    as_body,
    response_message,
    stats_messages,
    usage_message,
)
from gateway.rpc_logprobs import ToldLogprobs, entry_messages, prompt_messages
from gateway.schemas import ChatCompletionBody
from gateway.state import StateProvider

logger = logging.getLogger(__name__)

STATUS_OF = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    405: grpc.StatusCode.UNIMPLEMENTED,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    415: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
}
"""Canonical code of every HTTP status that an error has."""


def status_of(error: Exception) -> tuple[grpc.StatusCode, str]:
    """Return the canonical code and the details of an error: ``[code] message``; a bug hides its own."""
    if not isinstance(error, DFlashError):
        logger.error("gRPC call failed", exc_info=error)
        error = DFlashError("Internal error.")
    return STATUS_OF[error.status], f"[{error.code}] {error.message}"


class GenerationService:
    """What ``generation.proto`` promises. Keeps nothing of its own.

    Args:
        provider: as of the HTTP app.
        metrics: the HTTP app's, so that both count in one place.
    """

    def __init__(self, provider: StateProvider, metrics: GatewayMetrics) -> None:
        self._provider = provider
        self._metrics = metrics

    async def generate(self, request: pb.GenerateRequest) -> pb.GenerateResponse:
        """Return the whole answer.

        Raises:
            DFlashError: the request is refused, or the engine failed.
        """
        arrived = self._metrics.clock()
        state = self._provider()
        prepared, builder = await self._prepare(request)
        pieces = request_pieces(state, prepared.plans, self._metrics, arrived)
        if not prepared.plans[0].is_detailed:
            return response_message(await builder.whole(pieces), prepared.ignored)
        told = ToldLogprobs(prepared)
        response = response_message(await builder.whole(told.passing(pieces)), prepared.ignored)
        told.add_to(response, state.tokenizer)
        return response

    async def generate_stream(
        self, request: pb.GenerateRequest
    ) -> AsyncGenerator[pb.GenerateChunk, None]:
        """Yield the answer's chunks; the first comes when there is something to tell.

        Raises:
            DFlashError: the request is refused, or the engine failed.
        """
        arrived = self._metrics.clock()
        state = self._provider()
        prepared, builder = await self._prepare(request)
        num_running, ignored = len(prepared.plans), prepared.ignored
        first = prepared.plans[0]
        prompt = first.request.prompt_token_ids if first.returns_token_ids else []
        async with aclosing(
            request_pieces(state, prepared.plans, self._metrics, arrived)
        ) as pieces:
            async for piece in pieces:
                builder.take(piece)
                chunk = _chunk(piece, prepared, state.tokenizer)
                chunk.ignored_fields.extend(ignored)
                chunk.prompt_token_ids.extend(prompt)
                ignored, prompt = [], []
                if piece.finish_reason is not None:
                    num_running -= 1
                    if num_running == 0:
                        chunk.usage.CopyFrom(usage_message(builder.usage()))
                        chunk.stats.extend(stats_messages(builder.wanted_stats()))
                yield chunk

    def list_models(self) -> pb.ListModelsResponse:
        """Return the one model.

        Raises:
            EngineUnavailableError: the server is starting.
        """
        settings = self._provider().settings
        model = pb.Model(
            id=settings.model_id,
            created=settings.created,
            owned_by=settings.owned_by,
            max_model_len=settings.max_context,
        )
        return pb.ListModelsResponse(models=[model])

    async def check_ready(self) -> None:
        """Return if requests can be served now.

        Raises:
            EngineUnavailableError: they cannot, with the reason.
        """
        await self._provider().engine.check_ready()

    async def _prepare(self, request: pb.GenerateRequest) -> tuple[Prepared, ResponseBuilder]:
        state, body = self._provider(), as_body(request)
        shape: ResponseShape
        if isinstance(body, ChatCompletionBody):
            shape = ChatShape()
            prepared = await prepare_chat(state, body, new_response_id(shape.id_prefix))
        else:
            shape = CompletionShape()
            prepared = await prepare_completion(state, body, new_response_id(shape.id_prefix))
        return prepared, make_builder(state, body, prepared, shape, SseFraming())


def _chunk(piece: TextPiece, prepared: Prepared, tokenizer: ChatTokenizer) -> pb.GenerateChunk:
    chunk = pb.GenerateChunk(id=prepared.response_id, index=piece.choice_index, text=piece.text)
    detail = piece.detail
    if detail is not None:
        chunk.token_ids.extend(detail.token_ids)
        chunk.logprobs.extend(entry_messages(detail.logprobs, tokenizer))
        if piece.choice_index == 0 and detail.prompt_logprobs is not None:
            told = prompt_messages(prepared, detail.prompt_logprobs, tokenizer)
            chunk.prompt_logprobs.extend(told)
        for delta in detail.deltas:
            add_delta(chunk, delta)
    if piece.finish_reason is not None:
        chunk.finish_reason = piece.finish_reason
    return chunk
