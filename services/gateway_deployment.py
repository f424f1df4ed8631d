"""The gateway as Serve's ingress deployment: the FastAPI app around a ``ServeEngine``."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from gateway.app import create_app_from
from gateway.chat_tokenizer import ChatTokenizer
from gateway.state import GatewaySettings, GatewayState
from gateway.trace import ChunkRecorder
from services.config import AppArgs
from services.route_hints import RouteHints
from services.serve_engine import ServeEngine


@serve.ingress()
class GatewayDeployment:
    """One stateless HTTP replica."""

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
        self._state = GatewayState(engine, tokenizer, settings, recorder)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Build the ASGI app in the replica; Serve calls this after the constructor."""
        # Serve's proxy puts X-Request-Id on responses by itself.
        return create_app_from(lambda: self._state, sends_request_id=False)
