"""The outermost layer: request id, last-resort 500, and one count per HTTP request."""

from __future__ import annotations

import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import error_response, internal_error
from gateway.metrics import GatewayMetrics

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
SEND_BODY = "send_body"
"""Key of the request's state: the server's channel, for bodies whose head went through all layers."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestEnvelope:
    """Wraps every request; plain ASGI, so streams pass through untouched.

    Args:
        sends_request_id: put ``X-Request-Id`` on responses. False behind a proxy that does it.
    """

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, sends_request_id: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._sends_request_id = sends_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one ASGI connection; everything but HTTP passes through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = choose_request_id(headers.get("x-request-id"))
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state[SEND_BODY] = send
        status: int | None = None

        async def send_enveloped(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._sends_request_id:
                    MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_enveloped)
        except Exception:
            logger.exception("request_id=%s unhandled error", request_id)
            if status is not None:
                # The head is out; a broken connection is the only honest end left.
                raise
            error = internal_error(request_id)
            self._metrics.count_error(error.code)
            response = error_response(error, accept=headers.get("accept"))
            await response(scope, receive, send_enveloped)
        finally:
            self._metrics.count_request(_endpoint(scope), status or CLIENT_CLOSED_REQUEST)


def choose_request_id(offered: str | None) -> str:
    """Return the client's id if it is printable and short, else a new one."""
    if offered is not None and _REQUEST_ID.fullmatch(offered):
        return offered
    return uuid.uuid4().hex


def _endpoint(scope: Scope) -> str:
    """Return the route's template: raw paths would give every typo a time series of its own."""
    return str(getattr(scope.get("route"), "path", "unmatched"))
