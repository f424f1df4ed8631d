"""The coordinator as a Serve deployment: one replica is one engine group."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from dflash_wire.codec import decode_request
from dflash_wire.errors import DFlashError, EngineUnavailableError, error_to_wire
from dflash_wire.records import GenerationRequest, TokenChunk
from gateway.coordinator.coordinator import Coordinator
from gateway.routing.recent_names import RecentNames
from services.autoscaling import OUTSTANDING_TOKENS
from services.config import AppArgs
from services.engine_group import EngineGroup
from services.frames import FrameSender
from services.group_report import GroupReport
from services.links import pin_thread
from services.spec import EngineSpec

logger = logging.getLogger(__name__)


class _Call(NamedTuple):
    """A Serve call that waits for its request to end."""

    frame_address: str
    loop: asyncio.AbstractEventLoop
    ended: asyncio.Event


class CompletionSink:
    """``TokenSink`` that forwards frames and wakes the Serve calls whose request has ended.

    Owner: the coordinator's thread publishes; the event loop registers and forgets requests.
    """

    def __init__(self) -> None:
        self._frames = FrameSender(self._end_requests_of)
        self._waiting: dict[str, _Call] = {}
        self.cancel: Callable[[str], None] = lambda request_id: None
        """Set to the coordinator's: ends the requests of a gateway that is gone."""

    def register(self, request: GenerationRequest) -> asyncio.Event:
        """Return an event that is set when the request's last chunk went out."""
        call = _Call(request.frame_address, asyncio.get_running_loop(), asyncio.Event())
        self._waiting[request.request_id] = call
        return call.ended

    def forget(self, request_id: str) -> None:
        """Stop watching a request."""
        self._waiting.pop(request_id, None)

    def publish(self, chunks: dict[str, list[TokenChunk]]) -> None:
        """Send the frames, then wake finished calls."""
        self._frames.publish(chunks)
        for mine in chunks.values():
            for chunk in mine:
                if chunk.finish_reason is None and chunk.error is None:
                    continue
                self._wake(chunk.request_id)

    def _wake(self, request_id: str) -> None:
        call = self._waiting.get(request_id)
        if call is not None:
            call.loop.call_soon_threadsafe(call.ended.set)

    def _end_requests_of(self, frame_address: str) -> None:
        # Ray does not cancel the calls of a process that died, and nobody will read these tokens.
        orphans = [
            request_id
            for request_id, call in list(self._waiting.items())
            if call.frame_address == frame_address
        ]
        logger.warning("a gateway is gone; its %d requests end", len(orphans))
        for request_id in orphans:
            self.cancel(request_id)
            self._wake(request_id)


class CoordinatorDeployment:
    """Serve replica that hosts a ``Coordinator`` and owns its engine group.

    The step loop runs in a thread of its own, so neither HTTP nor Serve's control traffic sits on
    the token path. ``generate`` stays open until its request ends: Serve's router, queue limits and
    cancellation work as for any deployment.
    """

    def __init__(self, args: AppArgs, spec: EngineSpec) -> None:
        self._expected_output_tokens = args.routing.expected_output_tokens
        self._recent_names = RecentNames()
        self._group = EngineGroup(args, spec)
        self._sink = CompletionSink()
        self._coordinator = Coordinator(
            self._group.ring,
            self._sink,
            self._group.limits,
            args.engine.policy,
            max_waiting=args.engine.max_waiting,
            caches_prefixes=args.engine.prefix_cache,
        )
        self._sink.cancel = self._coordinator.cancel
        self._thread = threading.Thread(
            target=self._run, args=(args.link.pin_cpu,), name="coordinator", daemon=True
        )
        self._thread.start()

    def _run(self, pin_cpu: int | None) -> None:
        pin_thread(pin_cpu)
        self._coordinator.run_forever()

    async def generate(
        self, frame: bytes, work: int = 0, prefix: bytes = b""
    ) -> dict[str, str | None] | None:
        """Run one request to its end; its tokens travel as frames.

        Args:
            frame: an encoded ``GenerationRequest``.
            work: expected tokens, for the router.
            prefix: names of the prompt's beginnings, for this router and for those of other gateways.

        Returns:
            None when the last chunk went out, else the wire form of why it was refused.
        """
        request = decode_request(frame)
        self._recent_names.add(prefix)
        ended = self._sink.register(request)
        try:
            self._coordinator.submit(request)
            await ended.wait()
        except DFlashError as error:
            return error_to_wire(error)
        except asyncio.CancelledError:
            self._coordinator.cancel(request.request_id)
            raise
        finally:
            self._sink.forget(request.request_id)
        return None

    async def check_ready(self) -> dict[str, str | None] | None:
        """None when the group can serve, else the wire form of why not."""
        try:
            await self.check_health()
        except DFlashError as error:
            return error_to_wire(error)
        return None

    async def snapshot(self) -> dict[str, int]:
        """Gauges for tests and operators: rows, queue, pages, failures."""
        now = self._coordinator.snapshot()
        return {
            "num_running": now.num_running,
            "num_waiting": now.num_waiting,
            "num_outstanding_tokens": self._coordinator.outstanding_tokens(
                self._expected_output_tokens
            ),
            "num_free_pages": now.num_free_pages,
            "num_idle_pages": now.num_idle_pages,
            "num_pages": now.num_pages,
            "num_preemptions": now.num_preemptions,
            "num_steps": now.totals.num_steps,
            "num_failed_steps": now.totals.num_failed_steps,
        }

    async def record_routing_stats(self) -> dict[str, Any]:
        """What every gateway's router gets to know of this group; Serve calls it now and then."""
        now = self._coordinator.snapshot()
        outstanding = self._coordinator.outstanding_tokens(self._expected_output_tokens)
        names = self._recent_names.packed()
        return GroupReport(now.num_running, now.num_waiting, outstanding, names).to_stats()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What the autoscaling policy gets to know; Serve calls it where there is a policy."""
        outstanding = self._coordinator.outstanding_tokens(self._expected_output_tokens)
        return {OUTSTANDING_TOKENS: float(outstanding)}

    async def check_health(self) -> None:
        """Serve replaces the replica, and with it both actors, when this raises."""
        await self._group.check()
        if not self._thread.is_alive():
            raise EngineUnavailableError("the coordinator's step loop has ended")

    def __del__(self) -> None:
        """Called by Serve on shutdown: end live requests, then the actors."""
        coordinator = getattr(self, "_coordinator", None)
        if coordinator is not None:
            coordinator.close()
            self._thread.join(timeout=10)
        group = getattr(self, "_group", None)
        if group is not None:
            group.close()
