"""One engine group: its executors, what replaces them, and the coordinators' ways around the ring."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import ray

from dflash_wire.codec import decode_result, encode_drafts, encode_plan
from dflash_wire.errors import (
    EngineUnavailableError,
    ExecutorLostError,
    ExecutorsReplacedError,
)
from dflash_wire.gauges import GUIDED_COUNTS
from dflash_wire.ports import EngineLimits
from dflash_wire.records import DraftResult, StepPlan, StepResult
from services.config import AppArgs, LinkArgs
from services.executor_set import START_TIMEOUT_S, Addresses, ExecutorSet
from services.executors import PLAN
from services.links import POLL_MS, Inbound, Outbound, pin_sockets
from services.spec import EngineSpec

logger = logging.getLogger(__name__)

PING_TIMEOUT_S = 30
COUNTS_TIMEOUT_S = 1.0


class ZmqRing:
    """``StepRing`` over ControlLink. Owner: the coordinator's thread.

    Executors that were lost are replaced: ``replace`` gives the ring the new ones' addresses, and the
    next call of ``send`` or ``receive`` raises ``ExecutorsReplacedError``, for they know nothing of what
    was in flight and hold no pages. Until then ``send`` drops steps and ``receive`` waits. Once
    ``mark_lost`` was called there will be none: both raise ``EngineUnavailableError``; ``receive`` does
    that also when a step times out.
    """

    def __init__(self, link: LinkArgs, lane: int = 0) -> None:
        pin_sockets(link.pin_cpu)
        self._inbound = Inbound(link.kind, link.spin_ms)
        self._lane = lane
        self._drafters: list[Outbound] = []
        self._verifier: Outbound | None = None
        self._step_timeout_s = link.step_timeout_s
        self._lost_reason: str | None = None
        self._is_waiting = False
        self._replacement: tuple[Sequence[str], str] | None = None
        self._last_drafted_id = -1
        self._last_landed_id = -1

    @property
    def address(self) -> str:
        """Where the verifier sends results."""
        return self._inbound.address

    def connect(self, drafter_addresses: Sequence[str], verifier_address: str) -> None:
        """Set the stages: steps start at their first drafter, or at the verifier when they have none."""
        for outbound in (*self._drafters, self._verifier):
            if outbound is not None:
                outbound.close()
        self._drafters = [Outbound(address) for address in drafter_addresses]
        self._verifier = Outbound(verifier_address)

    def await_replacement(self) -> None:
        """An executor is gone and others will take its place; any thread may call this."""
        self._is_waiting = True

    def replace(self, drafter_addresses: Sequence[str], verifier_address: str) -> None:
        """All executors are new; any thread may call this."""
        self._replacement = (drafter_addresses, verifier_address)

    def mark_lost(self, reason: str) -> None:
        """Executors are gone and none take their place; any thread may call this."""
        self._lost_reason = reason

    def _check(self) -> None:
        """Raise what happened to the executors since the last call. Mutates."""
        if self._lost_reason is not None:
            raise EngineUnavailableError(self._lost_reason)
        replacement, self._replacement = self._replacement, None
        if replacement is not None:
            self.connect(*replacement)
            self._is_waiting = False
            raise ExecutorsReplacedError("an executor was lost; all have been replaced")

    def send(self, plan: StepPlan) -> None:
        """Send a step to its first drafter, or straight to the verifier.

        Straight only if no step is with a drafter that has to be verified first, and none may follow that
        has drafts: a verifier that finds two ways' messages waiting need not take the older one first.
        """
        self._check()
        if self._is_waiting:
            return
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
        timeout_s = self._step_timeout_s
        began = time.monotonic()
        while time.monotonic() - began < timeout_s:
            message = self._inbound.receive(POLL_MS)
            if message is None:
                self._check()
            else:
                result = decode_result(message[1])
                self._last_landed_id = result.step_id
                # An older step's result can arrive after that step was given up: not ours.
                if result.step_id >= step_id and not self._tells_of_loss(result):
                    return result
            if self._is_waiting:
                timeout_s = START_TIMEOUT_S
        raise EngineUnavailableError(f"step {step_id} did not return within {timeout_s:.0f} s")

    def _tells_of_loss(self, result: StepResult) -> bool:
        """Whether a step failed because an executor is gone: the health check finds that, too. Mutates."""
        is_lost = result.error is not None and result.error["code"] == ExecutorLostError.code
        self._is_waiting = self._is_waiting or is_lost
        return is_lost

    def close(self) -> None:
        """Close all sockets."""
        self._inbound.close()
        for outbound in (*self._drafters, self._verifier):
            if outbound is not None:
                outbound.close()


class EngineGroup:
    """The executors of one coordinator replica, and the rings that its coordinators drive them by.

    Owner: the coordinator deployment. ``rings`` has one entry per *lane*, that is per verifier.

    Executors are caches of what coordinators know. When one is lost all of the group are replaced, for
    they hold each other's memory; coordinators learn it from their rings and have sequences prefill again.

    Raises:
        ConfigError: models that cannot work together; surfaces from the actors as Ray's task error.
    """

    def __init__(self, args: AppArgs, spec: EngineSpec) -> None:
        self._args, self._spec = args, spec
        num_ranks = spec.num_ranks
        self.rings = [
            ZmqRing(args.link.for_lane(lane * num_ranks), lane) for lane in range(spec.num_lanes)
        ]
        self._guided_counts = dict.fromkeys(GUIDED_COUNTS, 0)
        self._compiling = [asyncio.Lock() for _ in self.rings]
        self._replacing: asyncio.Task[None] | None = None
        self.limits, addresses = self._start()
        for ring, verifier in zip(self.rings, addresses.verifiers, strict=True):
            ring.connect(addresses.drafters, verifier)
        logger.info("engine group ready, %d lanes: %s", len(self.rings), self.limits)

    def _start(self) -> tuple[EngineLimits, Addresses]:
        """Create all executors and let them know each other."""
        self._executors = ExecutorSet(self._args, self._spec)
        limits, addresses = self._executors.pair()
        self._executors.connect(addresses, [ring.address for ring in self.rings])
        return limits, addresses

    @property
    def is_being_replaced(self) -> bool:
        """Whether new executors are starting in the place of lost ones."""
        return self._replacing is not None

    async def check(self) -> None:
        """Ask all actors whether they can take steps; if one cannot, begin to replace them.

        Raises:
            EngineUnavailableError: they could not be replaced; the rings are marked lost.
        """
        if self._replacing is not None:
            if self._replacing.done():
                await self._end_replacing(self._replacing)
            return
        reason = await self._loss()
        if reason is not None:
            logger.warning("%s; all executors of the group are being replaced", reason)
            for ring in self.rings:
                ring.await_replacement()
            self._replacing = asyncio.create_task(asyncio.to_thread(self._replace))

    async def _loss(self) -> str | None:
        """Why steps cannot go on; None if they can."""
        for name, actor in self._executors.actors():
            try:
                is_alive = await asyncio.wait_for(actor.ping.remote(), PING_TIMEOUT_S)
            except (ray.exceptions.RayError, TimeoutError) as error:
                return f"the {name} actor is gone ({type(error).__name__})"
            if not is_alive:
                return f"the {name} actor cannot take steps any more"
        return None

    def _replace(self) -> None:
        self._executors.close()
        _, addresses = self._start()
        for ring, verifier in zip(self.rings, addresses.verifiers, strict=True):
            ring.replace(addresses.drafters, verifier)

    async def _end_replacing(self, replacing: asyncio.Task[None]) -> None:
        try:
            await replacing
        except Exception as error:
            reason = f"lost executors could not be replaced ({type(error).__name__}: {error})"
            for ring in self.rings:
                ring.mark_lost(reason)
            raise EngineUnavailableError(reason) from error
        logger.info("all executors of the group are new")
        self._replacing = None

    async def compile_grammar(self, lane: int, text: str) -> None:
        """Have a lane's verifier compile a grammar; one at a time, so that pings find a free thread.

        Raises:
            InvalidRequestError: it is none.
            EngineUnavailableError: the verifier is gone.
        """
        async with self._compiling[lane]:
            try:
                await self._executors.verifiers[lane].compile_grammar.remote(text)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            except ray.exceptions.RayError as error:
                raise EngineUnavailableError("the verifier is gone; try again") from error

    async def guided_counts(self) -> dict[str, int]:
        """Sums of the verifiers' counts (see ``VerifierActor.guided_counts``); the last known ones where a
        verifier does not answer in time. Mutates these."""
        calls = [verifier.guided_counts.remote() for verifier in self._executors.verifiers]
        try:
            counts = await asyncio.wait_for(asyncio.gather(*calls), COUNTS_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError):
            return self._guided_counts
        self._guided_counts = {name: sum(c[name] for c in counts) for name in GUIDED_COUNTS}
        return self._guided_counts

    def close(self) -> None:
        """End all actors and close the rings; the coordinators' threads have stopped by then."""
        self._executors.close()
        for ring in self.rings:
            ring.close()
