"""VerifierActor and DrafterActor: each runs its engine in one thread, fed by the ring.

Life cycle goes over Ray (load, pair, start, ping); steps go over the ring of ``links``. A message on
the ring is ``[kind, plan, drafts]``: kind PLAN on the way out, ERROR with an encoded ``StepResult``
when a stage failed, which later stages pass on untouched.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from dflash_wire.codec import (
    decode_drafts,
    decode_plan,
    encode_drafts,
    encode_result,
)
from dflash_wire.errors import error_to_wire
from dflash_wire.ports import EngineLimits
from dflash_wire.records import StepResult
from services.config import LinkArgs
from services.links import POLL_MS, Inbound, Outbound, pin_sockets, pin_thread
from services.spec import EngineSpec

# NOTE: torch is imported inside the actors. Builder and coordinator only need these classes to create
# them, and importing torch in three processes one after another would double the start-up time.

logger = logging.getLogger(__name__)

PLAN, ERROR = b"P", b"E"
Handler = Callable[[list[bytes]], list[bytes] | None]


class RingStage:
    """One stage of the ring: receive, handle, pass on, in a thread of its own.

    Owner of both sockets. A handler that returns None ends the step's way. A handler's exception
    becomes an ERROR message for that step; it never ends the loop.
    """

    def __init__(self, handler: Handler, link: LinkArgs, num_threads: int) -> None:
        self._handler = handler
        self._link = link
        self._num_threads = num_threads
        self._next_address = ""
        self._stopped = threading.Event()
        self._bound = threading.Event()
        self._connected = threading.Event()
        self.address = ""
        self._thread = threading.Thread(target=self._loop, name="ring", daemon=True)
        self._thread.start()
        self._bound.wait()

    def connect(self, next_address: str) -> None:
        """Tell the stage where its messages go; starts the traffic."""
        self._next_address = next_address
        self._connected.set()

    def is_alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the thread and close its sockets."""
        self._stopped.set()
        self._connected.set()
        self._thread.join(timeout=10)

    def _loop(self) -> None:
        import torch

        # OpenMP's thread count belongs to the calling thread, so it is set here and not in __init__.
        torch.set_num_threads(self._num_threads)
        pin_sockets(self._link.pin_cpu)
        pin_thread(self._link.pin_cpu)
        inbound = Inbound(self._link.kind, self._link.spin_ms)
        self.address = inbound.address
        self._bound.set()
        self._connected.wait()
        outbound = Outbound(self._next_address) if self._next_address else None
        while outbound is not None and not self._stopped.is_set():
            message = inbound.receive(POLL_MS)
            if message is None:
                continue
            answer = self._handle(message)
            if answer is not None:
                outbound.send(answer)
        inbound.close()
        if outbound is not None:
            outbound.close()

    def _handle(self, message: list[bytes]) -> list[bytes] | None:
        if message[0] == ERROR:
            return message
        try:
            return self._handler(message)
        except Exception as error:
            logger.exception("a step failed")
            step_id = decode_plan(message[1]).step_id
            return [ERROR, encode_result(StepResult(step_id, [], error=error_to_wire(error)))]


class StepGate:
    """Lets steps through in ascending order only. Owner: the stage's thread.

    A step that the coordinator gave up while the drafter held it can be overtaken by one that needs no
    drafter; its pages may have other owners by the time it arrives.
    """

    def __init__(self) -> None:
        self._last_step_id = -1

    def admits(self, step_id: int) -> bool:
        """Whether the step may run; mutates."""
        if step_id <= self._last_step_id:
            return False
        self._last_step_id = step_id
        return True


class VerifierActor:
    """Ray actor around the target model. Life cycle: ``pair``, ``connect``."""

    def __init__(self, spec: EngineSpec, link: LinkArgs, feature_transport: str) -> None:
        import torch

        from services.engines import load_target
        from services.shm_transport import register_shm_transport

        register_shm_transport()
        torch.set_num_threads(spec.verifier_threads)
        self._spec = spec
        self._link = link
        self._feature_transport = feature_transport
        self._target = load_target(spec)
        self._stage: RingStage | None = None
        self._gate = StepGate()

    def pair(
        self, facts: dict[str, int], taps: list[int], draft_block_size: int
    ) -> tuple[list[Any], str, EngineLimits]:
        """Build the engine for a drafter.

        Returns:
            the feature pool's reference (in a list, so that Ray does not resolve it), the ring
            address of this actor, and the limits to plan with.

        Raises:
            ConfigError: the drafter was not made for this target.
        """
        from services.engines import build_verifier, check_pair, engine_limits
        from services.feature_pool import FeatureSender

        spec, target = self._spec, self._target
        check_pair(target, facts, taps)
        shape = (2 * spec.max_step_positions, len(taps) * target.hidden_size)
        self._sender = FeatureSender(shape, target.dtype, target.device, self._feature_transport)
        self._engine = build_verifier(spec, target, self._sender.pool, taps)
        self._stage = RingStage(self._verify, self._link, spec.verifier_threads)
        limits = engine_limits(spec, target.max_positions, draft_block_size)
        return [self._sender.reference()], self._stage.address, limits

    def connect(self, next_address: str) -> None:
        """Start taking steps; the drafter has mapped the feature pool by now."""
        self._sender.peer_attached()
        assert self._stage is not None
        self._stage.connect(next_address)

    def ping(self) -> bool:
        """Whether the actor can take steps."""
        return self._stage is not None and self._stage.is_alive()

    def _verify(self, message: list[bytes]) -> list[bytes] | None:
        plan = decode_plan(message[1])
        if not self._gate.admits(plan.step_id):
            logger.warning("step %d came too late and is dropped", plan.step_id)
            return None
        return [PLAN, encode_result(self._engine.run(plan, decode_drafts(message[2])))]


class DrafterActor:
    """Ray actor around the draft model. Life cycle: ``describe``, ``attach``, ``connect``."""

    def __init__(self, spec: EngineSpec, link: LinkArgs, feature_mode: str) -> None:
        import torch

        from services.engines import load_drafter
        from services.shm_transport import register_shm_transport

        register_shm_transport()
        torch.set_num_threads(spec.drafter_threads)
        self._spec = spec
        self._link = link
        self._feature_mode = feature_mode
        self._model = load_drafter(spec)
        self._stage: RingStage | None = None
        self._is_beside_verifier = False

    def describe(self) -> tuple[dict[str, int], list[int], int]:
        """What the verifier must know: config facts, tapped layers, draft block size."""
        from services.engines import draft_facts

        model = self._model
        return draft_facts(model), model.target_layer_ids, model.draft_block_size

    def attach(self, references: list[Any]) -> str:
        """Map the feature pool and build the engine; returns this actor's ring address."""
        from services.engines import build_drafter
        from services.feature_pool import FeatureReceiver

        self._features = FeatureReceiver(references[0], self._feature_mode)
        self._engine = build_drafter(self._spec, self._model, self._features.pool)
        self._stage = RingStage(self._draft, self._link, self._spec.drafter_threads)
        return self._stage.address

    def connect(self, next_address: str) -> None:
        """Start taking steps."""
        assert self._stage is not None
        self._stage.connect(next_address)

    def ping(self) -> bool:
        """Whether the actor can take steps."""
        return self._stage is not None and self._stage.is_alive()

    def _draft(self, message: list[bytes]) -> list[bytes]:
        plan = decode_plan(message[1])
        self._move_beside_verifier(plan.num_cohorts > 1)
        if plan.ingests:
            self._features.refresh()
        return [PLAN, message[1], encode_drafts(self._engine.run(plan))]

    def _move_beside_verifier(self, works_at_the_same_time: bool) -> None:
        """Pinned threads share a CPU while they work in turn; with two cohorts that CPU is the verifier's."""
        if self._link.pin_cpu is None or works_at_the_same_time == self._is_beside_verifier:
            return
        self._is_beside_verifier = works_at_the_same_time
        pin_thread(self._link.pin_cpu + works_at_the_same_time)
