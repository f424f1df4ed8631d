"""One engine group: the pair of actors, their pairing, and the coordinator's way around the ring."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, NoReturn

import ray

from dflash_wire.codec import decode_result, encode_drafts, encode_plan
from dflash_wire.errors import EngineUnavailableError
from dflash_wire.ports import EngineLimits
from dflash_wire.records import DraftResult, StepPlan, StepResult
from services.config import AppArgs, ExecutorArgs, LinkArgs
from services.executors import PLAN, DrafterActor, VerifierActor
from services.links import POLL_MS, Inbound, Outbound, pin_sockets
from services.spec import EngineSpec

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600
PING_TIMEOUT_S = 30


class ZmqRing:
    """``StepRing`` over ControlLink. Owner: the coordinator's thread.

    ``send`` and ``receive`` raise ``EngineUnavailableError`` once ``mark_lost`` was called, ``receive`` also
    when a step times out.
    """

    def __init__(self, link: LinkArgs) -> None:
        pin_sockets(link.pin_cpu)
        self._inbound = Inbound(link.kind, link.spin_ms)
        self._drafter: Outbound | None = None
        self._verifier: Outbound | None = None
        self._step_timeout_s = link.step_timeout_s
        self._lost_reason: str | None = None
        self._last_drafted_id = -1
        self._last_landed_id = -1

    @property
    def address(self) -> str:
        """Where the verifier sends results."""
        return self._inbound.address

    def connect(self, drafter_address: str, verifier_address: str) -> None:
        """Set the stages: steps start at the drafter, or at the verifier when it has nothing to do."""
        self._drafter = Outbound(drafter_address)
        self._verifier = Outbound(verifier_address)

    def mark_lost(self, reason: str) -> None:
        """Called from the health check's thread when an actor is gone."""
        self._lost_reason = reason

    def send(self, plan: StepPlan) -> None:
        """Send a step to the drafter, or straight to the verifier.

        Straight only if no step is with the drafter that has to be verified first.
        """
        if self._lost_reason is not None:
            raise EngineUnavailableError(self._lost_reason)
        assert self._drafter is not None and self._verifier is not None
        if plan.needs_drafter or self._last_drafted_id > self._last_landed_id:
            self._drafter.send([PLAN, encode_plan(plan)])
            self._last_drafted_id = plan.step_id
        else:
            self._verifier.send([PLAN, encode_plan(plan), encode_drafts(DraftResult.nothing(plan))])

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
        for outbound in (self._drafter, self._verifier):
            if outbound is not None:
                outbound.close()


def _create(cls: type, executor: ExecutorArgs, *arguments: Any) -> Any:
    return (
        ray.remote(cls)
        .options(
            num_cpus=executor.num_cpus,
            num_gpus=executor.num_gpus,
            # One thread answers pings while another loads or serves direct transport.
            max_concurrency=2,
            max_restarts=0,
            enable_tensor_transport=True,
        )
        .remote(*arguments)
    )


class EngineGroup:
    """Verifier and drafter actors of one coordinator replica.

    Owner: the coordinator deployment. The actors are children of the creating process, so they end
    with it. Construction loads both models in parallel and pairs them.

    Raises:
        ConfigError: the pair cannot work; surfaces from the actors as Ray's task error.
    """

    def __init__(self, args: AppArgs, spec: EngineSpec) -> None:
        link = args.link
        self.ring = ZmqRing(link)
        self._verifier = _create(VerifierActor, args.verifier, spec, link, args.features.transport)
        self._drafter = _create(DrafterActor, args.drafter, spec, link, args.features.mode)
        self.limits = self._pair()

    def _pair(self) -> EngineLimits:
        facts, taps, draft_block_size = ray.get(
            self._drafter.describe.remote(), timeout=START_TIMEOUT_S
        )
        references, verifier_address, limits = ray.get(
            self._verifier.pair.remote(facts, taps, draft_block_size), timeout=START_TIMEOUT_S
        )
        drafter_address = ray.get(self._drafter.attach.remote(references), timeout=START_TIMEOUT_S)
        ray.get(
            [
                self._verifier.connect.remote(self.ring.address),
                self._drafter.connect.remote(verifier_address),
            ],
            timeout=START_TIMEOUT_S,
        )
        self.ring.connect(drafter_address, verifier_address)
        logger.info("engine group ready: %s", limits)
        paired: EngineLimits = limits
        return paired

    async def check(self) -> None:
        """Ask both actors whether they can take steps.

        Raises:
            EngineUnavailableError: one is gone or its step thread has ended; the ring is marked lost.
        """
        for name, actor in (("verifier", self._verifier), ("drafter", self._drafter)):
            try:
                is_alive = await asyncio.wait_for(actor.ping.remote(), PING_TIMEOUT_S)
            except (ray.exceptions.RayError, TimeoutError) as error:
                self._lose(
                    f"the {name} actor is gone ({type(error).__name__}); it is being replaced"
                )
            if not is_alive:
                self._lose(f"the {name} actor's step thread has ended; it is being replaced")

    def _lose(self, reason: str) -> NoReturn:
        self.ring.mark_lost(reason)
        raise EngineUnavailableError(reason)

    def close(self) -> None:
        """End both actors and close the ring; the coordinator's thread has stopped by then."""
        for actor in (self._verifier, self._drafter):
            ray.kill(actor)
        self.ring.close()
