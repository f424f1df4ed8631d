"""``EnginePort`` over Ray Serve: one handle call per request, tokens from the frame stream."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
)
from ray.serve.handle import DeploymentHandle

from dflash_wire.codec import encode_request
from dflash_wire.errors import (
    EngineUnavailableError,
    OverloadedError,
    error_from_wire,
)
from dflash_wire.records import EngineGroupLoad, GenerationRequest, TokenChunk
from services.frames import FrameReceiver
from services.group_report import last_loads
from services.route_hints import RouteHints

READY_TIMEOUT_S = 5.0


class ServeEngine:
    """What the gateway sees of the coordinators.

    Args:
        coordinator: handle of the coordinator deployment.
        link_kind: ``ipc`` or ``tcp``, for the frame stream.
        hints: what the router is told of a request.
    """

    def __init__(
        self, coordinator: DeploymentHandle[Any], link_kind: str, hints: RouteHints
    ) -> None:
        self._coordinator = coordinator
        self._hints = hints
        self._frames = FrameReceiver(link_kind)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        """See ``EnginePort.generate``."""
        self._frames.start()
        # Unique inside the system even when two clients send the same X-Request-Id.
        internal_id = uuid.uuid4().hex
        sent = replace(request, request_id=internal_id, frame_address=self._frames.address)
        is_finished = False
        async with self._frames.queue_of(internal_id) as queue:
            hints = self._hints.of(request)
            response = self._coordinator.generate.remote(encode_request(sent), **hints)
            call = asyncio.ensure_future(_outcome(response))
            # The last frame usually comes before the call returns, so nobody may be left to await it.
            call.add_done_callback(_retrieve)
            try:
                async for chunk in _complete(_until_last(queue, call)):
                    is_finished = chunk.finish_reason is not None
                    yield replace(chunk, request_id=request.request_id)
            finally:
                if not is_finished and not call.done():
                    response.cancel()  # type: ignore[no-untyped-call]

    async def check_ready(self) -> None:
        """See ``EnginePort.check_ready``."""
        response = self._coordinator.check_ready.remote()
        try:
            await asyncio.wait_for(_outcome(response), READY_TIMEOUT_S)
        except TimeoutError as error:
            raise EngineUnavailableError("no engine group answers yet") from error

    def group_loads(self) -> list[EngineGroupLoad]:
        """See ``EnginePort.group_loads``."""
        return last_loads(self._coordinator.app_name, self._coordinator.deployment_name)


async def _outcome(response: Any) -> None:
    """Wait for a coordinator call; translate every way in which it can fail."""
    try:
        failure = await response
    except BackPressureError as error:
        raise OverloadedError("too many requests wait; try again later") from error
    except DeploymentUnavailableError as error:
        raise EngineUnavailableError(
            "no engine group can start; the server's log says why"
        ) from error
    except (RayError, RayServeException) as error:
        raise EngineUnavailableError(
            f"the engine group was lost ({type(error).__name__}); try again"
        ) from error
    if failure is not None:
        raise error_from_wire(failure)


def _retrieve(call: asyncio.Future[None]) -> None:
    """Take note of how a call ended, so that asyncio does not report it as forgotten."""
    if not call.cancelled():
        call.exception()


async def _complete(chunks: AsyncIterator[TokenChunk]) -> AsyncIterator[TokenChunk]:
    """Pass chunks on as long as none is missing: an answer with a hole must not look like a whole one."""
    num_tokens = 0
    async for chunk in chunks:
        if chunk.num_before != num_tokens:
            raise EngineUnavailableError("some of the answer's tokens were lost; try again")
        num_tokens += len(chunk.token_ids)
        yield chunk


async def _until_last(
    queue: asyncio.Queue[TokenChunk | asyncio.Future[None]], call: asyncio.Future[None]
) -> AsyncIterator[TokenChunk]:
    """Yield chunks up to the last one; end early with the call's error if it fails."""
    call.add_done_callback(queue.put_nowait)
    timeout_s: float | None = None
    while True:
        try:
            item = await asyncio.wait_for(queue.get(), timeout_s)
        except TimeoutError as error:
            raise EngineUnavailableError("the engine's last tokens were lost; try again") from error
        if isinstance(item, asyncio.Future):
            item.result()  # raises what ended the call
            # It ended well, so the last frame is on its way; do not wait for it for ever.
            timeout_s = READY_TIMEOUT_S
            continue
        if item.error is not None:
            raise error_from_wire(item.error)
        yield item
        if item.finish_reason is not None:
            return
