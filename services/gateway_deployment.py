"""The gateway as Serve's ingress: the FastAPI app and the gRPC service around a ``ServeEngine``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from ray import serve
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle

from dflash_wire.errors import DFlashError, RetryableError
from dflash_wire.v1 import generation_pb2 as pb
from gateway.app import create_app_from
from gateway.chat_tokenizer import ChatTokenizer
from gateway.metrics import GatewayMetrics
from gateway.rpc_service import GenerationService, status_of
from gateway.state import GatewaySettings, GatewayState
from gateway.trace import ChunkRecorder
from services.config import AppArgs
from services.grammar_checker import GrammarChecker
from services.route_hints import RouteHints
from services.serve_engine import ServeEngine


@serve.ingress()
class GatewayDeployment:
    """One stateless replica for HTTP and gRPC.

    Serve calls the methods with capital letters by the names they have in ``generation.proto`` and in gRPC's
    health protocol; it gives each a context, on which a status is set.
    """

    def __init__(
        self,
        args: AppArgs,
        settings: GatewaySettings,
        target_path: str,
        coordinator: DeploymentHandle[Any],
    ) -> None:
        tokenizer = ChatTokenizer.load(target_path)
        hints = RouteHints(args.engine.page_size, args.routing.expected_output_tokens)
        engine = ServeEngine(coordinator, args.link.kind, hints)
        recorder = ChunkRecorder() if args.gateway.trace else None
        checker = GrammarChecker(target_path, settings.vocab_size)
        self._state = GatewayState(engine, tokenizer, settings, recorder, checker.check)
        self._metrics = GatewayMetrics()
        self._service = GenerationService(lambda: self._state, self._metrics)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Build the ASGI app in the replica; Serve calls this after the constructor."""
        # Serve's proxy puts X-Request-Id on responses by itself.
        return create_app_from(lambda: self._state, metrics=self._metrics, sends_request_id=False)

    async def Generate(
        self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> pb.GenerateResponse:
        """Answer as a whole."""
        try:
            return await self._service.generate(request)
        except Exception as error:
            # Returned, not raised: a client's mistake is no traceback in our log.
            self._set_status(error, grpc_context)
            return pb.GenerateResponse()

    async def GenerateStream(
        self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[pb.GenerateChunk, None]:
        """Answer while it is generated."""
        try:
            async with aclosing(self._service.generate_stream(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except Exception as error:
            # A status reaches the client with a message or an exception only, and an exception is a traceback
            # in the logs of two processes.
            self._set_status(error, grpc_context)
            yield pb.GenerateChunk()

    async def ListModels(self, request: pb.ListModelsRequest) -> pb.ListModelsResponse:
        """Name the model."""
        return self._service.list_models()

    async def Check(self, request: HealthCheckRequest) -> HealthCheckResponse:
        """Say whether requests can be served now, as gRPC's health protocol does."""
        try:
            await self._service.check_ready()
        except RetryableError:
            return HealthCheckResponse(status=HealthCheckResponse.NOT_SERVING)
        return HealthCheckResponse(status=HealthCheckResponse.SERVING)

    def _set_status(self, error: Exception, context: RayServegRPCContext) -> None:
        code, details = status_of(error)
        self._metrics.count_error(
            error.code if isinstance(error, DFlashError) else DFlashError.code
        )
        context.set_code(code)
        context.set_details(details)
