"""Builds the gateway: an ASGI app that answers the OpenAI API from an ``EnginePort``.

Two ways in. When engine, tokenizer and settings exist::

    app = create_app(engine, tokenizer, settings)

When they do not exist yet, hand over a function that returns them. It is called for every request,
must be cheap, and raises ``EngineUnavailableError`` while the server is starting (clients get 503;
``/health`` and ``/metrics`` answer already)::

    app = create_app_from(provider)

An app holds metrics with locks and cannot be pickled, so build it where it runs. In Ray Serve that
is the late-bound form of ``@serve.ingress()``, whose ``__serve_build_asgi_app__`` is called on the
replica after the constructor. Serve's proxy puts ``X-Request-Id`` on responses by itself, hence
``sends_request_id=False`` there.
"""

from __future__ import annotations

from fastapi import FastAPI

from dflash_wire.ports import EnginePort
from gateway.admin import admin_router
from gateway.chat_tokenizer import ChatTokenizer
from gateway.endpoints import openai_router
from gateway.errors import install_error_handlers
from gateway.metrics import GatewayMetrics
from gateway.middleware import RequestEnvelope
from gateway.openapi import install_document
from gateway.operations import operations_router
from gateway.responses_endpoint import responses_router
from gateway.state import GatewaySettings, GatewayState, GrammarCheck, StateProvider
from gateway.token_endpoints import token_router


def create_app(
    engine: EnginePort,
    tokenizer: ChatTokenizer,
    settings: GatewaySettings,
    *,
    grammar_check: GrammarCheck | None = None,
    metrics: GatewayMetrics | None = None,
    sends_request_id: bool = True,
) -> FastAPI:
    """Return the gateway over an engine that exists; see ``create_app_from`` for the rest."""
    state = GatewayState(engine, tokenizer, settings, grammar_check=grammar_check)
    return create_app_from(lambda: state, metrics=metrics, sends_request_id=sends_request_id)


def create_app_from(
    provider: StateProvider,
    *,
    metrics: GatewayMetrics | None = None,
    sends_request_id: bool = True,
) -> FastAPI:
    """Return the gateway over whatever ``provider`` returns when a request arrives.

    Args:
        metrics: where to count; by default metrics of the app's own.
        sends_request_id: put ``X-Request-Id`` on responses; False if a proxy in front does.
    """
    metrics = metrics or GatewayMetrics()
    # A redirect for a trailing slash would turn a POST into a puzzle: 404 is clearer.
    app = FastAPI(title="DFlash", redirect_slashes=False)
    install_error_handlers(app, metrics)
    app.add_middleware(RequestEnvelope, metrics=metrics, sends_request_id=sends_request_id)
    app.include_router(openai_router(provider, metrics))
    app.include_router(responses_router(provider, metrics))
    app.include_router(operations_router(provider, metrics))
    app.include_router(token_router(provider))
    app.include_router(admin_router(provider))
    install_document(app)
    return app
