"""The ranks of a split target beyond the first: actors that do what rank 0's verifier tells them.

They hear of passes over a ControlLink of their own, from rank 0's step thread to theirs; the sums inside
a pass go over torch.distributed. Neither involves Ray.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import ray

from services.config import LinkArgs
from services.links import Inbound, LinkStage, Message, Outbound
from services.spec import EngineSpec

logger = logging.getLogger(__name__)


def own_host() -> str:
    """The address at which other ranks reach this process."""
    return str(ray.util.get_node_ip_address()) if ray.is_initialized() else "127.0.0.1"


class RankLinks:
    """Rank 0's sockets to the others. Owner: its step thread, which opens them with the first message."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses
        self._outbounds: list[Outbound] = []

    def tell(self, message: Message) -> None:
        """Send a message to every other rank.

        Raises:
            EngineUnavailableError: one does not take messages.
        """
        if not self._outbounds:
            self._outbounds = [Outbound(address) for address in self._addresses]
        for outbound in self._outbounds:
            outbound.send(message)

    def close(self) -> None:
        """Close all sockets."""
        for outbound in self._outbounds:
            outbound.close()


class RankStage(LinkStage):
    """A rank's thread: handles messages in order, and ends with the first that fails.

    Unlike a ``RingStage`` it does not go on then: what came next would be summed up with what is left
    over on the other ranks.

    Args:
        handle: takes one message.
        link: how to listen.
        num_threads: torch threads.
    """

    def __init__(self, handle: Callable[[Message], None], link: LinkArgs, num_threads: int) -> None:
        super().__init__("rank", link, num_threads)
        self._handle = handle
        self._start()

    def _serve(self, inbound: Inbound) -> None:
        try:
            for message in self._messages(inbound):
                self._handle(message)
        except Exception:
            logger.exception("this rank of the target cannot go on")


class RankActor:
    """Ray actor around one rank's share of the target, from rank 1 on. Life cycle: ``join``.

    Args:
        spec: of the engine.
        link: how to listen.
        rank: which share.
    """

    def __init__(self, spec: EngineSpec, link: LinkArgs, rank: int) -> None:
        import torch

        from services.engines import load_target, rank_group

        torch.set_num_threads(spec.verifier_threads)
        self._spec = spec
        self._link = link
        self._group = rank_group(spec, rank, link.step_timeout_s)
        self._target = load_target(spec, self._group)
        self._stage: RankStage | None = None

    def join(self, host: str, port: int) -> str:
        """Meet the other ranks at rank 0's store; return where this one listens.

        Raises:
            EngineUnavailableError: a rank did not come.
        """
        from services.engines import build_rank

        self._group.join(host, port)
        engine = build_rank(self._spec, self._target)
        self._stage = RankStage(engine.handle, self._link, self._spec.verifier_threads)
        return self._stage.address

    def ping(self) -> bool:
        """Whether the rank can take passes."""
        return self._stage is not None and self._stage.is_alive()
