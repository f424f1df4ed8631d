"""VerifierActor and DrafterActor: each runs its engine in one thread, fed by the ring.

Life cycle goes over Ray (load, pair, start, ping); steps go over the ring of ``links``. A message on
the ring is ``[kind, plan, route, drafts]``: kind PLAN on the way out, ERROR with an encoded
``StepResult`` in the plan's place when a stage failed, which later stages pass on untouched. The route
is one byte for the lane and one for every drafter that the step has still to visit, this one included;
drafts are there once a drafter, or the coordinator in its place, has put them in.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dflash_wire.codec import (
    decode_drafts,
    decode_plan,
    encode_drafts,
    encode_result,
)
from dflash_wire.errors import error_to_wire
from dflash_wire.gauges import GUIDED_COUNTS
from dflash_wire.ports import EngineLimits
from dflash_wire.records import DraftResult, StepResult
from services.config import LinkArgs
from services.links import Inbound, LinkStage, Message, Outbound, pin_thread
from services.ranks import RankLinks, own_host
from services.spec import DraftFacts, EngineSpec

if TYPE_CHECKING:
    from verifier.ranks import RankLeader

# NOTE: torch is imported inside the actors. Builder and coordinator only need these classes to create
# them, and importing torch in three processes one after another would double the start-up time.

logger = logging.getLogger(__name__)

PLAN, ERROR = b"P", b"E"
STEPS_PER_LANE = 2
"""Most steps of one lane that wait for a drafter and are worth one pass together."""

Handler = Callable[[Message], Message | None]


def first_peer(message: Message) -> int:
    """The way of a stage with one peer."""
    return 0


class RingStage(LinkStage):
    """One stage of the ring: receive, handle, pass on, in a thread of its own.

    A handler that returns None ends the step's way. A handler's exception becomes an ERROR message for
    that step; it never ends the loop.

    Args:
        handler: answers one message.
        link: how to listen.
        num_threads: torch threads.
        peer_of: the peer that an answer goes to, as its place among the addresses of ``connect``.
        together: answers messages that wait at the same time, in order; for a stage that does several
            faster than one by one.
        most_together: most messages that it is given.
    """

    def __init__(
        self,
        handler: Handler,
        link: LinkArgs,
        num_threads: int,
        peer_of: Callable[[Message], int] = first_peer,
        together: Callable[[list[Message]], list[Message]] | None = None,
        most_together: int = 1,
    ) -> None:
        super().__init__("ring", link, num_threads)
        self._handler = handler
        self._peer_of = peer_of
        self._together = together
        self._most_together = most_together
        self._peer_addresses: tuple[str, ...] = ()
        self._connected = threading.Event()
        self._start()

    def connect(self, *peer_addresses: str) -> None:
        """Tell the stage where its messages go; starts the traffic."""
        self._peer_addresses = peer_addresses
        self._connected.set()

    def stop(self) -> None:
        """End the thread and close its sockets, whether it is connected or not."""
        self._stopped.set()
        self._connected.set()
        super().stop()

    def _serve(self, inbound: Inbound) -> None:
        self._connected.wait()
        peers = [Outbound(address) for address in self._peer_addresses]
        try:
            for message in self._messages(inbound):
                messages = [message]
                if self._most_together > 1:
                    messages += inbound.waiting(self._most_together - 1)
                for answer in self._answers(messages):
                    peers[self._peer_of(answer)].send(answer)
        finally:
            for peer in peers:
                peer.close()

    def _answers(self, messages: list[Message]) -> list[Message]:
        plans = [message for message in messages if message[0] != ERROR]
        if self._together is not None and len(plans) > 1:
            errors = [message for message in messages if message[0] == ERROR]
            try:
                return errors + self._together(plans)
            except Exception:
                # One of the steps is to blame, and only that one shall fail.
                logger.exception("a pass over %d steps failed; they run one by one", len(plans))
        answers = map(self._handle, messages)
        return [answer for answer in answers if answer is not None]

    def _handle(self, message: Message) -> Message | None:
        if message[0] == ERROR:
            return message
        try:
            return self._handler(message)
        except Exception as error:
            logger.exception("a step failed")
            step_id = decode_plan(message[1]).step_id
            frame = encode_result(StepResult(step_id, [], error=error_to_wire(error)))
            return [ERROR, frame, message[2][:1]]  # no drafter can help it any more


def settle(device: str) -> None:
    """Let a GPU finish what this thread gave it; nothing on a CPU.

    A message says that a step's features may be read, or overwritten. Between processes only a finished
    stream makes that true.
    """
    if device != "cpu":
        import torch

        torch.cuda.current_stream().synchronize()


class StepGate:
    """Lets steps through in ascending order only. Owner: the stage's thread.

    A step that the coordinator gave up while the drafter held it can be overtaken by one that needs no
    drafter; its pages may have other owners by the time it arrives.
    """

    def __init__(self) -> None:
        self._last_step_id = -(2**62)  # a start-up sweep has negative ids

    def admits(self, step_id: int) -> bool:
        """Whether the step may run; mutates."""
        if step_id <= self._last_step_id:
            return False
        self._last_step_id = step_id
        return True


class VerifierActor:
    """Ray actor around the target model, or rank 0's share of it.

    Life cycle: with other ranks ``open_ranks``, ``join_ranks`` and ``lead_ranks``, then ``pair``,
    ``connect``.
    """

    def __init__(self, spec: EngineSpec, link: LinkArgs) -> None:
        import torch

        from services.engines import load_target, rank_group
        from services.shm_transport import register_shm_transport

        register_shm_transport()
        torch.set_num_threads(spec.verifier_threads)
        self._spec = spec
        self._link = link
        self._group = rank_group(spec, 0, link.step_timeout_s) if spec.num_ranks > 1 else None
        self._target = load_target(spec, self._group)
        self._ranks: RankLeader | None = None
        self._stage: RingStage | None = None
        self._gate = StepGate()

    def open_ranks(self) -> tuple[str, int]:
        """Let the other ranks find this one; return host and port."""
        assert self._group is not None
        host = own_host()
        return host, self._group.open(host)

    def join_ranks(self, host: str, port: int) -> None:
        """Meet the other ranks, which join at the same time.

        Raises:
            EngineUnavailableError: one did not come.
        """
        assert self._group is not None
        self._group.join(host, port)

    def lead_ranks(self, addresses: list[str]) -> None:
        """Learn where the other ranks listen."""
        from verifier.ranks import RankLeader

        self._ranks = RankLeader(RankLinks(addresses).tell)

    def pair(self, drafters: list[DraftFacts]) -> tuple[list[Any], str, EngineLimits]:
        """Build the engine for its drafters.

        Returns:
            the feature pool's reference (in a list, so that Ray does not resolve it), the ring
            address of this actor, and the limits to plan with.

        Raises:
            ConfigError: a drafter was not made for this target.
        """
        from services.engines import (
            build_verifier,
            check_pair,
            engine_limits,
            feature_width,
            union_taps,
        )
        from services.feature_pool import FeatureSender

        spec, target = self._spec, self._target
        for drafter in drafters:
            check_pair(target, drafter.config, drafter.taps)
        taps = union_taps([drafter.taps for drafter in drafters])
        shape = (2 * spec.max_step_positions, feature_width(spec, target, taps))
        transport = spec.features.transport
        self._sender = FeatureSender(shape, target.dtype, target.device, transport)
        self._engine = build_verifier(spec, target, self._sender.pool, taps, self._ranks)
        self._stage = RingStage(self._verify, self._link, spec.verifier_threads)
        sizes = [drafter.draft_block_size for drafter in drafters]
        limits = engine_limits(spec, target.max_positions, sizes)
        return [self._sender.reference()], self._stage.address, limits

    def connect(self, next_address: str) -> None:
        """Start taking steps; every drafter has mapped the feature pool by now."""
        self._sender.peer_attached()
        assert self._stage is not None
        self._stage.connect(next_address)

    def ping(self) -> bool:
        """Whether the actor can take steps."""
        is_broken = self._ranks is not None and self._ranks.is_broken
        return self._stage is not None and self._stage.is_alive() and not is_broken

    def compile_grammar(self, text: str) -> None:
        """Have a grammar ready when its request's first step comes; steps go on meanwhile.

        Raises:
            InvalidRequestError: it is none.
        """
        self._engine.compile_grammar(text)

    def guided_counts(self) -> dict[str, int]:
        """What grammars have done here, by the names in ``GroupGauges``."""
        return {name: getattr(self._engine, name) for name in GUIDED_COUNTS}

    def _verify(self, message: Message) -> Message | None:
        plan = decode_plan(message[1])
        if not self._gate.admits(plan.step_id):
            logger.warning("step %d came too late and is dropped", plan.step_id)
            return None
        result = self._engine.run(plan, decode_drafts(message[3]))
        settle(self._spec.device)
        return [PLAN, encode_result(result)]


class DrafterActor:
    """Ray actor around one draft model. Life cycle: ``describe``, ``attach``, ``connect``."""

    def __init__(self, spec: EngineSpec, link: LinkArgs, index: int) -> None:
        import torch

        from services.engines import load_drafter
        from services.shm_transport import register_shm_transport

        register_shm_transport()
        torch.set_num_threads(spec.drafter_threads)
        self._spec = spec
        self._link = link
        self._index = index
        self._model = load_drafter(spec, index)
        self._stage: RingStage | None = None
        self._is_beside_verifier = False

    def describe(self) -> DraftFacts:
        """What the verifiers must know."""
        from services.engines import draft_facts

        return draft_facts(self._model)

    def attach(self, references: list[Any], drafters: list[DraftFacts]) -> str:
        """Map the feature pools and build the engine.

        Args:
            references: the feature pool of every lane.
            drafters: all drafters of the target, by index.

        Returns:
            this actor's ring address.
        """
        from services.engines import build_drafter, taps_within, union_taps
        from services.feature_pool import FeatureReceiver

        spec = self._spec
        self._features = [FeatureReceiver(one, spec.features) for one in references]
        union = union_taps([drafter.taps for drafter in drafters])
        taps = taps_within(union, self._model.target_layer_ids)
        pools = [features.pool for features in self._features]
        self._engine = build_drafter(spec, self._model, pools, self._index, taps)
        self._stage = RingStage(
            self._draft,
            self._link,
            spec.drafter_threads,
            self._peer_of,
            self._draft_together,
            STEPS_PER_LANE * len(pools) if len(pools) > 1 else 1,
        )
        return self._stage.address

    def connect(self, verifier_addresses: list[str], drafter_addresses: list[str]) -> None:
        """Start taking steps; the verifiers by lane, the drafters by index."""
        assert self._stage is not None
        self._stage.connect(*verifier_addresses, *drafter_addresses)

    def ping(self) -> bool:
        """Whether the actor can take steps."""
        return self._stage is not None and self._stage.is_alive()

    def _peer_of(self, message: Message) -> int:
        """The next drafter of the step, or its lane's verifier."""
        route = message[2]
        return route[0] if len(route) == 1 else self._spec.num_lanes + route[1]

    def _draft(self, message: Message) -> Message:
        return self._draft_together([message])[0]

    def _draft_together(self, messages: list[Message]) -> list[Message]:
        steps = [(message[2][0], decode_plan(message[1])) for message in messages]
        self._move_beside_verifier(any(plan.num_cohorts > 1 for _, plan in steps))
        if self._model.target_layer_ids:  # else it reads no features
            for lane in {lane for lane, plan in steps if plan.ingests}:
                self._features[lane].refresh()
        results = self._engine.run_together(steps)
        settle(self._spec.device)
        return [passed_on(*pair) for pair in zip(messages, results, strict=True)]

    def _move_beside_verifier(self, works_at_the_same_time: bool) -> None:
        """Pinned threads share a CPU while they work in turn; with two cohorts that CPU is the verifier's."""
        if self._link.pin_cpu is None or works_at_the_same_time == self._is_beside_verifier:
            return
        self._is_beside_verifier = works_at_the_same_time
        pin_thread(self._link.pin_cpu + works_at_the_same_time)


def passed_on(message: Message, drafts: DraftResult) -> Message:
    """The message as the next stage gets it: this drafter is done."""
    kind, plan, route, *earlier = message
    for frame in earlier:
        drafts = drafts.merged(decode_drafts(frame))
    return [kind, plan, route[:1] + route[2:], encode_drafts(drafts)]
