"""The coordinator as a Serve deployment: one replica is one engine group."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

from ray import serve

from dflash_wire.codec import decode_request
from dflash_wire.errors import DFlashError, EngineUnavailableError, error_to_wire
from dflash_wire.ports import EngineLimits, StepRing
from dflash_wire.records import GenerationRequest, TokenChunk
from gateway.coordinator.block_scheduler.scheduler import BlockScheduler
from gateway.coordinator.coordinator import Coordinator
from gateway.coordinator.lanes import choose_lane
from gateway.coordinator.sequence import Sequence
from gateway.coordinator.stats import AcceptanceCounters, EngineSnapshot
from gateway.routing.recent_names import RecentNames
from services.autoscaling import OUTSTANDING_TOKENS
from services.config import AppArgs, EngineArgs
from services.engine_group import EngineGroup
from services.frames import FrameSender
from services.group_report import GroupReport
from services.links import avoid_cpu, pin_thread
from services.log_setup import hang_under_serve
from services.spec import EngineSpec
from services.step_costs import measured_samples, scheduler_for

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
        """Send the frames, then wake finished calls; a gateway notices if its last frame is missing."""
        try:
            self._frames.publish(chunks)
        finally:
            for mine in chunks.values():
                for chunk in mine:
                    if chunk.finish_reason is not None or chunk.error is not None:
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


def allowed_cohorts(engine: EngineArgs, limits: EngineLimits) -> tuple[int, ...]:
    """How many steps may be in flight.

    One where requests choose among several drafters: steps take different ways then, and a step that
    overtakes another would be verified before it.
    """
    if len(limits.all_drafters) > 1:
        return (1,)
    return (1, 2) if engine.cohorts == "auto" else (engine.cohorts,)


class Lane:
    """One verifier's coordinator, its step loop's thread and its sink.

    Owner: the deployment. The step loop runs in a thread of its own, so neither HTTP nor Serve's control
    traffic sits on the token path.
    """

    def __init__(
        self, ring: StepRing, limits: EngineLimits, engine: EngineArgs, scheduler: BlockScheduler
    ) -> None:
        self.sink = CompletionSink()
        self.coordinator = Coordinator(
            ring,
            self.sink,
            limits,
            engine.policy,
            max_waiting=engine.max_waiting,
            caches_prefixes=engine.prefix_cache,
            cohorts=allowed_cohorts(engine, limits),
            scheduler=scheduler,
        )
        self.sink.cancel = self.coordinator.cancel
        self._thread: threading.Thread | None = None

    def start(self, pin_cpu: int | None) -> None:
        """Start the step loop, and learning beside it: executors need that CPU meanwhile."""
        self.coordinator.learning.start_thread(partial(avoid_cpu, pin_cpu))
        self._thread = threading.Thread(
            target=self._run, args=(pin_cpu,), name="coordinator", daemon=True
        )
        self._thread.start()

    def _run(self, pin_cpu: int | None) -> None:
        pin_thread(pin_cpu)
        self.coordinator.run_forever()

    def is_alive(self) -> bool:
        """Whether the step loop runs."""
        return self._thread is not None and self._thread.is_alive()

    async def run(self, sequence: Sequence) -> None:
        """Run one prepared sequence to its end; cancelling this ends it."""
        request = sequence.request
        ended = self.sink.register(request)
        try:
            self.coordinator.enqueue(sequence)
            await ended.wait()
        except asyncio.CancelledError:
            self.coordinator.cancel(request.request_id)
            raise
        finally:
            self.sink.forget(request.request_id)

    def stop(self) -> None:
        """End live requests and the step loop."""
        self.coordinator.close()
        if self._thread is not None:
            self._thread.join(timeout=10)


class CoordinatorDeployment:
    """Serve replica that hosts the coordinators of an engine group, one per verifier.

    ``generate`` stays open until its request ends: Serve's router, queue limits and cancellation work as
    for any deployment.
    """

    def __init__(self, args: AppArgs, spec: EngineSpec) -> None:
        hang_under_serve()
        self._expected_output_tokens = args.routing.expected_output_tokens
        self._recent_names = RecentNames()
        self._group = EngineGroup(args, spec)
        limits = self._group.limits
        # Lanes are alike; one after the other would only make the start longer.
        samples = measured_samples(args, spec, self._group.rings[0], limits)
        self._lanes = [
            Lane(ring, limits, args.engine, scheduler_for(args, limits, samples))
            for ring in self._group.rings
        ]
        for index, lane in enumerate(self._lanes):
            lane.start(args.link.for_lane(index * spec.num_ranks).pin_cpu)

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
        self._recent_names.add(prefix)
        try:
            request = decode_request(frame)
            sequence = self._lanes[0].coordinator.prepare(request)
            lane = self._lane_for(sequence)
            if request.processors is not None and request.processors.grammar:
                grammar = request.processors.grammar
                await self._group.compile_grammar(self._lanes.index(lane), grammar)
            await lane.run(sequence)
        except DFlashError as error:
            return error_to_wire(error)
        return None

    def _lane_for(self, sequence: Sequence) -> Lane:
        if len(self._lanes) == 1:
            return self._lanes[0]
        coordinators = [lane.coordinator for lane in self._lanes]
        num_live = [coordinator.num_live for coordinator in coordinators]
        num_cached = [coordinator.num_cached_pages(sequence) for coordinator in coordinators]
        return self._lanes[choose_lane(num_live, num_cached)]

    async def check_ready(self) -> dict[str, str | None] | None:
        """None when the group can serve, else the wire form of why not."""
        try:
            await self.check_health()
            if self._group.is_being_replaced:
                raise EngineUnavailableError("lost executors are being replaced; requests wait")
        except DFlashError as error:
            return error_to_wire(error)
        return None

    async def snapshot(self) -> dict[str, Any]:
        """Gauges and totals for tests and operators: sums over the lanes, and per lane and drafter."""
        lanes = [lane.coordinator.snapshot() for lane in self._lanes]
        gauges = [_gauges(now) for now in lanes]
        sums: dict[str, Any] = {name: sum(one[name] for one in gauges) for name in gauges[0]}
        names = [drafter.name for drafter in self._group.limits.all_drafters]
        drafters = {
            name: {
                field.name: sum(getattr(now.totals.by_drafter[index], field.name) for now in lanes)
                for field in fields(AcceptanceCounters)
            }
            for index, name in enumerate(names)
        }
        group = serve.get_replica_context().replica_id.unique_id
        return {
            "group": group,
            **sums,
            "num_outstanding_tokens": self._outstanding_tokens(),
            "guided": await self._group.guided_counts(),
            "lanes": gauges,
            "drafters": drafters,
            "schedulers": [
                tuple(lane.coordinator.learning.scheduler.gauges()) for lane in self._lanes
            ],
        }

    async def decisions(self, most: int) -> dict[str, list[str]]:
        """The block schedulers' latest decisions in words, by ``group/lane``."""
        group = serve.get_replica_context().replica_id.unique_id
        logs = [lane.coordinator.learning.scheduler.explain(most) for lane in self._lanes]
        return {f"{group}/{index}": log for index, log in enumerate(logs)}

    async def set_policy(self, policy: str) -> dict[str, str | None] | None:
        """Change the default policy; None when all lanes have it, else the wire form of why not."""
        try:
            for lane in self._lanes:
                lane.coordinator.set_policy(policy)
        except DFlashError as error:
            return error_to_wire(error)
        return None

    async def recorded_steps(self) -> list[list[tuple[float, ...]]]:
        """Per lane, the fields of its latest ``StepRecord``s."""
        return [[tuple(r) for r in lane.coordinator.recorded_steps()] for lane in self._lanes]

    async def record_routing_stats(self) -> dict[str, Any]:
        """What every gateway's router gets to know of this group; Serve calls it now and then."""
        return GroupReport(self._outstanding_tokens(), self._recent_names.packed()).to_stats()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What the autoscaling policy gets to know; Serve calls it where there is a policy."""
        return {OUTSTANDING_TOKENS: float(self._outstanding_tokens())}

    def _outstanding_tokens(self) -> int:
        expected = self._expected_output_tokens
        return sum(lane.coordinator.outstanding_tokens(expected) for lane in self._lanes)

    async def check_health(self) -> None:
        """Serve replaces the replica, and with it all actors, when this raises."""
        await self._group.check()
        if not all(lane.is_alive() for lane in self._lanes):
            raise EngineUnavailableError("a coordinator's step loop has ended")

    def __del__(self) -> None:
        """Called by Serve on shutdown: end live requests, then the actors."""
        for lane in getattr(self, "_lanes", []):
            lane.stop()
        group = getattr(self, "_group", None)
        if group is not None:
            group.close()


def _gauges(now: EngineSnapshot) -> dict[str, int]:
    return {
        "num_running": now.num_running,
        "num_waiting": now.num_waiting,
        "num_free_pages": now.num_free_pages,
        "num_idle_pages": now.num_idle_pages,
        "num_pages": now.num_pages,
        "num_preemptions": now.num_preemptions,
        "num_steps": now.totals.num_steps,
        "num_failed_steps": now.totals.num_failed_steps,
    }
