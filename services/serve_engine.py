"""``EnginePort`` over Ray Serve: one handle call per request, tokens from the frame stream."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
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
from dflash_wire.gauges import GroupGauges, SchedulerGauges
from dflash_wire.records import (
    GenerationRequest,
    StepRecord,
    TokenChunk,
)
from services.frames import ChunkQueue, FrameReceiver
from services.route_hints import RouteHints

READY_TIMEOUT_S = 5.0
LAST_FRAME_TIMEOUT_S = 30.0
"""A busy machine delivers late; nobody but the reader waits for a frame that was lost."""
GAUGES_TIMEOUT_S = 2.0
_LAST_FRAME_IS_LATE = object()


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
            call.add_done_callback(queue.put_nowait)
            num_tokens = 0
            try:
                while not is_finished:
                    item = await queue.get()
                    if not isinstance(item, TokenChunk):
                        _take_end(item, queue)
                        continue
                    _check(item, num_tokens)
                    num_tokens += len(item.token_ids)
                    is_finished = item.finish_reason is not None
                    item.request_id = request.request_id
                    yield item
            finally:
                if not is_finished and not call.done():
                    response.cancel()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Stop listening for tokens; call in the event loop that generated."""
        self._frames.close()

    async def check_ready(self) -> None:
        """See ``EnginePort.check_ready``; one group is enough."""
        failures = await self._ask_all(
            "check_ready", READY_TIMEOUT_S, is_enough=lambda failure: failure is None
        )
        answers = [failure for failure in failures if not isinstance(failure, BaseException)]
        if None in answers:
            return
        if answers:
            raise error_from_wire(answers[0])
        raise EngineUnavailableError("no engine group answers yet")

    async def gauges(self) -> list[GroupGauges]:
        """See ``EnginePort.gauges``; groups that do not answer in time are left out."""
        answers = await self._ask_all("snapshot", GAUGES_TIMEOUT_S)
        return [_group_gauges(answer) for answer in _dicts(answers)]

    async def recorded_steps(self) -> list[list[StepRecord]]:
        """See ``EnginePort.recorded_steps``."""
        answers = await self._ask_all("recorded_steps", GAUGES_TIMEOUT_S)
        lanes = [lane for answer in answers if isinstance(answer, list) for lane in answer]
        return [[StepRecord(*record) for record in lane] for lane in lanes]

    async def decisions(self, most: int) -> dict[str, list[str]]:
        """See ``EnginePort.decisions``."""
        answers = await self._ask_all("decisions", GAUGES_TIMEOUT_S, most)
        return {name: log for answer in _dicts(answers) for name, log in answer.items()}

    async def set_policy(self, policy: str) -> int:
        """See ``EnginePort.set_policy``."""
        answers = await self._ask_all("set_policy", READY_TIMEOUT_S, policy)
        refusals = [error_from_wire(answer) for answer in _dicts(answers)]
        if refusals:
            raise refusals[0]
        changed = [answer for answer in answers if answer is None]
        if not changed:
            raise EngineUnavailableError("no engine group answers yet")
        return len(changed)

    async def _ask_all(
        self,
        method: str,
        timeout_s: float,
        *arguments: Any,
        is_enough: Callable[[Any], bool] = lambda answer: False,
    ) -> list[Any]:
        """Ask every group, past the queue of requests: a full engine is ready, and must be seen.

        Args:
            is_enough: after an answer like this nobody waits for the others.

        Returns:
            What came in time: answers, and exceptions of groups that failed.
        """
        now = asyncio.get_running_loop().time
        deadline = now() + timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                response = self._coordinator.broadcast(method, *arguments)
                # NOTE: results_async gives all answers or none: one group that hangs would hide the others.
                calls = await response._fetch_replica_results_async()
        except (RayError, RayServeException, TimeoutError):
            return []
        asked = [asyncio.ensure_future(call.get_async()) for call in calls]
        waiting, answers = set(asked), list[Any]()
        try:
            while waiting and not any(map(is_enough, answers)) and now() < deadline:
                _, waiting = await asyncio.wait(
                    waiting, timeout=deadline - now(), return_when=asyncio.FIRST_COMPLETED
                )
                came = [one for one in asked if one.done() and not one.cancelled()]
                answers = [one.exception() or one.result() for one in came]
        finally:
            for one in asked:
                one.cancel()
        return answers


def _dicts(answers: list[Any]) -> list[dict[str, Any]]:
    return [answer for answer in answers if isinstance(answer, dict)]


def _group_gauges(snapshot: dict[str, Any]) -> GroupGauges:
    return GroupGauges(
        group=snapshot["group"],
        num_running=snapshot["num_running"],
        num_waiting=snapshot["num_waiting"],
        num_outstanding_tokens=snapshot["num_outstanding_tokens"],
        num_pages=snapshot["num_pages"],
        num_held_pages=snapshot["num_pages"] - snapshot["num_free_pages"],
        num_idle_pages=snapshot["num_idle_pages"],
        num_preemptions=snapshot["num_preemptions"],
        num_steps=snapshot["num_steps"],
        num_failed_steps=snapshot["num_failed_steps"],
        **snapshot["guided"],
        schedulers=tuple(SchedulerGauges(*gauges) for gauges in snapshot["schedulers"]),
    )


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


def _check(chunk: TokenChunk, num_tokens: int) -> None:
    """Raise what a chunk reports, and for a hole: it must not look like a whole answer.

    Args:
        num_tokens: tokens of the chunks before this one.
    """
    if chunk.error is not None:
        raise error_from_wire(chunk.error)
    if chunk.num_before != num_tokens:
        raise EngineUnavailableError("some of the answer's tokens were lost; try again")


def _take_end(item: Any, queue: ChunkQueue) -> None:
    """Take in that the call has ended, and some time later that the last chunk still has not come."""
    if item is _LAST_FRAME_IS_LATE:
        raise EngineUnavailableError("the engine's last tokens were lost; try again")
    item.result()  # raises what ended the call
    # It ended well, so the last frame is on its way; do not wait for it for ever.
    loop = asyncio.get_running_loop()
    loop.call_later(LAST_FRAME_TIMEOUT_S, queue.put_nowait, _LAST_FRAME_IS_LATE)
