"""Endpoints for those who run the server: probes, version and metrics."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from dflash_wire.errors import EngineUnavailableError, NotFoundError
from gateway.metrics import GatewayMetrics
from gateway.openapi import answering
from gateway.state import StateProvider
from gateway.trace import chrome_trace


def operations_router(provider: StateProvider, metrics: GatewayMetrics) -> APIRouter:
    """Return the routes that are not OpenAI's."""
    router = APIRouter(tags=["operations"])

    @router.get("/health", **answering("Status"))
    async def health() -> Response:
        """Say that this process answers; never asks the engine."""
        return JSONResponse({"status": "ok"})

    @router.get("/ready", **answering("Status", errors=[503]))
    async def ready() -> Response:
        """Say whether requests can be served now; 503 with the reason if not."""
        await provider().engine.check_ready()
        return JSONResponse({"status": "ready"})

    @router.get("/version", **answering("Version", errors=[503]))
    async def version() -> Response:
        """Name the running version."""
        return JSONResponse({"version": provider().settings.version})

    @router.get("/metrics", **answering("text/plain"))
    async def prometheus() -> Response:
        """Return this gateway's metrics, and every engine group's, in Prometheus' text format."""
        try:
            metrics.groups.now = await provider().engine.gauges()
        except EngineUnavailableError:
            metrics.groups.now = []  # still starting: this gateway's own metrics are there already
        return Response(metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @router.get("/trace", **answering("Trace", errors=[404, 503]))
    async def trace() -> Response:
        """Return when what happened in the latest steps, as a Chrome trace; only with ``gateway.trace``."""
        state = provider()
        if state.recorder is None:
            raise NotFoundError("Traces are off; switch them on with gateway.trace: true.")
        groups = await state.engine.recorded_steps()
        return JSONResponse(chrome_trace(groups, state.recorder.records))

    return router
