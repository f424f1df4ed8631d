"""One engine group: its actors, their pairing, and the coordinators' ways around the ring."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import ray

from dflash_wire.codec import decode_result, encode_drafts, encode_plan
from dflash_wire.errors import EngineUnavailableError
from dflash_wire.gauges import GUIDED_COUNTS
from dflash_wire.ports import EngineLimits
from dflash_wire.records import DraftResult, StepPlan, StepResult
from services.config import AppArgs, ExecutorArgs, LinkArgs
from services.executors import PLAN, DrafterActor, VerifierActor
from services.links import POLL_MS, Inbound, Outbound, pin_sockets
from services.spec import EngineSpec

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600
PING_TIMEOUT_S = 30
COUNTS_TIMEOUT_S = 1.0


class ZmqRing:
    """``StepRing`` over ControlLink. Owner: the coordinator's thread.

    ``send`` and ``receive`` raise ``EngineUnavailableError`` once ``mark_lost`` was called, ``receive`` also
    when a step times out.
    """

    def __init__(self, link: LinkArgs, lane: int = 0) -> None:
        pin_sockets(link.pin_cpu)
        self._inbound = Inbound(link.kind, link.spin_ms)
        self._lane = lane
        self._drafters: list[Outbound] = []
        self._verifier: Outbound | None = None
        self._step_timeout_s = link.step_timeout_s
        self._lost_reason: str | None = None
        self._last_drafted_id = -1
        self._last_landed_id = -1

    @property
    def address(self) -> str:
        """Where the verifier sends results."""
        return self._inbound.address

    def connect(self, drafter_addresses: Sequence[str], verifier_address: str) -> None:
        """Set the stages: steps start at their first drafter, or at the verifier when they have none."""
        self._drafters = [Outbound(address) for address in drafter_addresses]
        self._verifier = Outbound(verifier_address)

    def mark_lost(self, reason: str) -> None:
        """Called from the health check's thread when an actor is gone."""
        self._lost_reason = reason

    def send(self, plan: StepPlan) -> None:
        """Send a step to its first drafter, or straight to the verifier.

        Straight only if no step is with a drafter that has to be verified first, and none may follow that
        has drafts: a verifier that finds two ways' messages waiting need not take the older one first.
        """
        if self._lost_reason is not None:
            raise EngineUnavailableError(self._lost_reason)
        assert self._verifier is not None
        drafters = plan.drafters
        may_follow = plan.num_cohorts > 1
        if (
            not drafters
            and self._drafters
            and (may_follow or self._last_drafted_id > self._last_landed_id)
        ):
            drafters = [0]
        message = [PLAN, encode_plan(plan), bytes([self._lane, *drafters])]
        if drafters:
            self._drafters[drafters[0]].send(message)
            self._last_drafted_id = plan.step_id
        else:
            self._verifier.send([*message, encode_drafts(DraftResult.nothing(plan))])

    def receive(self, step_id: int) -> StepResult:
        """Wait for the result of a step."""
        deadline = time.monotonic() + self._step_timeout_s
        while time.monotonic() < deadline:
            message = self._inbound.receive(POLL_MS)
            if message is not None:
                result = decode_result(message[1])
                self._last_landed_id = result.step_id
                # An older step's result can arrive after that step was given up: not ours.
                if result.step_id >= step_id:
                    return result
            elif self._lost_reason is not None:
                raise EngineUnavailableError(self._lost_reason)
        raise EngineUnavailableError(
            f"step {step_id} did not return within {self._step_timeout_s:.0f} s"
        )

    def close(self) -> None:
        """Close all sockets."""
        self._inbound.close()
        for outbound in (*self._drafters, self._verifier):
            if outbound is not None:
                outbound.close()


def _create(cls: type, executor: ExecutorArgs, *arguments: Any) -> Any:
    return (
        ray.remote(cls)
        .options(
            num_cpus=executor.num_cpus,
            num_gpus=executor.num_gpus,
            # One answers pings while others load, serve direct transport, or compile a grammar.
            max_concurrency=3,
            max_restarts=0,
            enable_tensor_transport=True,
        )
        .remote(*arguments)
    )


def _get(references: list[Any]) -> list[Any]:
    """Wait for calls of the start-up."""
    results: list[Any] = ray.get(references, timeout=START_TIMEOUT_S)
    return results


class EngineGroup:
    """The actors of one coordinator replica: drafters, and the verifiers that share them.

    Owner: the coordinator deployment. The actors are children of the creating process, so they end
    with it. Construction loads all models in parallel and pairs them. ``rings`` has one entry per
    *lane*, that is per verifier.

    Raises:
        ConfigError: models that cannot work together; surfaces from the actors as Ray's task error.
    """

    def __init__(self, args: AppArgs, spec: EngineSpec) -> None:
        links = [args.link.for_lane(lane) for lane in range(spec.num_lanes)]
        self.rings = [ZmqRing(link, lane) for lane, link in enumerate(links)]
        transport, mode = args.features.transport, args.features.mode
        self._verifiers = [
            _create(VerifierActor, args.verifier, spec, link, transport) for link in links
        ]
        self._drafters = [
            _create(DrafterActor, args.drafter, spec, args.link, mode, index)
            for index in range(len(spec.drafters))
        ]
        self._guided_counts = dict.fromkeys(GUIDED_COUNTS, 0)
        self._compiling = [asyncio.Lock() for _ in links]
        self.limits = self._pair()

    def _pair(self) -> EngineLimits:
        facts = _get([drafter.describe.remote() for drafter in self._drafters])
        paired = _get([verifier.pair.remote(facts) for verifier in self._verifiers])
        references = [reference for (reference,), _, _ in paired]
        verifier_addresses = [address for _, address, _ in paired]
        limits: EngineLimits = paired[0][2]
        drafter_addresses = _get(
            [drafter.attach.remote(references, facts) for drafter in self._drafters]
        )
        _get(
            [
                verifier.connect.remote(ring.address)
                for verifier, ring in zip(self._verifiers, self.rings, strict=True)
            ]
            + [
                drafter.connect.remote(verifier_addresses, drafter_addresses)
                for drafter in self._drafters
            ]
        )
        for ring, verifier_address in zip(self.rings, verifier_addresses, strict=True):
            ring.connect(drafter_addresses, verifier_address)
        logger.info("engine group ready, %d lanes: %s", len(self.rings), limits)
        return limits

    async def check(self) -> None:
        """Ask all actors whether they can take steps.

        Raises:
            EngineUnavailableError: one is gone or its step thread has ended; the rings are marked lost.
        """
        for name, actor in self._actors():
            try:
                is_alive = await asyncio.wait_for(actor.ping.remote(), PING_TIMEOUT_S)
            except (ray.exceptions.RayError, TimeoutError) as error:
                self._lose(
                    f"the {name} actor is gone ({type(error).__name__}); it is being replaced"
                )
            if not is_alive:
                self._lose(f"the {name} actor's step thread has ended; it is being replaced")

    async def compile_grammar(self, lane: int, text: str) -> None:
        """Have a lane's verifier compile a grammar; one at a time, so that pings find a free thread.

        Raises:
            InvalidRequestError: it is none.
            EngineUnavailableError: the verifier is gone.
        """
        async with self._compiling[lane]:
            try:
                await self._verifiers[lane].compile_grammar.remote(text)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            except ray.exceptions.RayError as error:
                raise EngineUnavailableError("the verifier is gone; try again") from error

    async def guided_counts(self) -> dict[str, int]:
        """Sums of the verifiers' counts (see ``VerifierActor.guided_counts``); the last known ones where a
        verifier does not answer in time. Mutates these."""
        calls = [verifier.guided_counts.remote() for verifier in self._verifiers]
        try:
            counts = await asyncio.wait_for(asyncio.gather(*calls), COUNTS_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError):
            return self._guided_counts
        self._guided_counts = {name: sum(c[name] for c in counts) for name in GUIDED_COUNTS}
        return self._guided_counts

    def _actors(self) -> list[tuple[str, Any]]:
        verifiers = [("verifier", actor) for actor in self._verifiers]
        return verifiers + [("drafter", actor) for actor in self._drafters]

    def _lose(self, reason: str) -> NoReturn:
        for ring in self.rings:
            ring.mark_lost(reason)
        raise EngineUnavailableError(reason)

    def close(self) -> None:
        """End all actors and close the rings; the coordinators' threads have stopped by then."""
        for _, actor in self._actors():
            ray.kill(actor)
        for ring in self.rings:
            ring.close()
