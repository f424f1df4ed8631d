"""A streamed response that fails as loudly as its moment allows."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from dflash_wire.errors import DFlashError, RequestCancelledError
from gateway.disconnect import until_disconnect
from gateway.errors import error_body, internal_error
from gateway.framing import Framing
from gateway.metrics import GatewayMetrics
from gateway.middleware import SEND_BODY

logger = logging.getLogger(__name__)


class EventStreamResponse(Response):
    """Streams ready-made events; one write per item of ``events``.

    The head is sent with the first item. An error before it is raised and becomes an ordinary
    error response; an error after it becomes an error event, and the stream ends without
    ``[DONE]``, which tells clients that the answer is incomplete. ``events`` is always closed,
    also when the client goes away.

    Args:
        framing: that of ``events``, for an error that follows them.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        framing: Framing,
        metrics: GatewayMetrics,
        request_id: str,
        headers: Mapping[str, str],
    ) -> None:
        self.background = None
        self.status_code = 200
        self.media_type = framing.media_type
        self._events = events
        self._framing = framing
        self._metrics = metrics
        self._request_id = request_id
        no_buffering = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        self.init_headers({**no_buffering, **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; ends quietly when the client has gone."""
        try:
            await until_disconnect(receive, self._run(send, scope["state"][SEND_BODY]))
        except RequestCancelledError:
            logger.debug("request_id=%s client closed the stream", self._request_id)

    async def _run(self, send: Send, send_body: Send) -> None:
        # The layers in between only want to see the head; every event would pay for each of them.
        is_started = False
        async with aclosing(self._events) as events:
            try:
                async for data in events:
                    if not is_started:
                        is_started = True
                        await self._send_head(send)
                    await _send_body(send_body, data)
            except RequestCancelledError:
                raise
            except Exception as error:
                if not is_started:
                    raise
                await _send_body(send, self._error_event(error))
        await _send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    def _error_event(self, error: Exception) -> bytes:
        if not isinstance(error, DFlashError):
            logger.error("request_id=%s stream failed", self._request_id, exc_info=error)
            error = internal_error(self._request_id)
        self._metrics.count_error(error.code)
        return self._framing.event(error_body(error))

    async def _send_head(self, send: Send) -> None:
        head = {"type": "http.response.start", "status": self.status_code}
        await _send(send, {**head, "headers": self.raw_headers})


async def _send_body(send: Send, data: bytes) -> None:
    await _send(send, {"type": "http.response.body", "body": data, "more_body": True})


async def _send(send: Send, message: Message) -> None:
    try:
        await send(message)
    except OSError as error:
        # ASGI's word for a closed connection; an OSError of the engine must not look like it.
        raise RequestCancelledError("The client closed the connection.") from error
