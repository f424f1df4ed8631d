"""The ranks of a split target beyond the first: actors that do what rank 0's verifier tells them.

They hear of passes over a ControlLink of their own, from rank 0's step thread to theirs; the sums inside
a pass go over torch.distributed. Neither involves Ray.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import ray

from services.config import LinkArgs
from services.links import POLL_MS, Inbound, Outbound, pin_sockets, pin_thread
from services.spec import EngineSpec

logger = logging.getLogger(__name__)

Message = list[bytes]


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


class RankStage:
    """A rank's thread: handles messages in order, and ends with the first that fails.

    Unlike a ``RingStage`` it does not go on then: what came next would be summed up with what is left
    over on the other ranks.

    Args:
        handle: takes one message.
        link: how to listen.
        num_threads: torch threads.
    """

    def __init__(self, handle: Callable[[Message], None], link: LinkArgs, num_threads: int) -> None:
        self._handle = handle
        self._link = link
        self._num_threads = num_threads
        self._stopped = threading.Event()
        self._bound = threading.Event()
        self.address = ""
        self._thread = threading.Thread(target=self._loop, name="rank", daemon=True)
        self._thread.start()
        self._bound.wait()

    def is_alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the thread and close its socket."""
        self._stopped.set()
        self._thread.join(timeout=10)

    def _loop(self) -> None:
        import torch

        # OpenMP's thread count belongs to the calling thread, and so does CUDA's current device.
        torch.set_num_threads(self._num_threads)
        pin_sockets(self._link.pin_cpu)
        pin_thread(self._link.pin_cpu)
        inbound = Inbound(self._link.kind, self._link.spin_ms)
        self.address = inbound.address
        self._bound.set()
        try:
            while not self._stopped.is_set():
                message = inbound.receive(POLL_MS)
                if message is not None:
                    self._handle(message)
        except Exception:
            logger.exception("this rank of the target cannot go on")
        finally:
            inbound.close()


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
