"""ControlLink: msgpack frames over ZeroMQ, one inbound socket per process, and the threads that listen there.

``ipc`` uses Linux's abstract namespace, so no file is left behind whatever kills a process; elsewhere
and between nodes it is ``tcp``.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import ray
import zmq

from dflash_wire.errors import EngineUnavailableError
from services.config import LinkArgs

POLL_MS = 500

Message = list[bytes]


def bind_inbound(socket: Any, kind: str) -> str:
    """Bind a PULL socket (plain or asyncio) and return the address peers connect to."""
    if kind == "ipc" and sys.platform.startswith("linux"):
        address = f"ipc://@dflash-{uuid.uuid4().hex}"
        socket.bind(address)
        return address
    host = ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1"
    port = socket.bind_to_random_port(f"tcp://{host}")
    return f"tcp://{host}:{port}"


def pin_thread(cpu: int | None) -> None:
    """Keep the calling thread on one CPU, where the system can; None leaves it alone."""
    if cpu is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {_allowed_cpu(cpu)})


def avoid_cpu(cpu: int | None) -> None:
    """Keep the calling thread off a CPU, where the system can and there is another; None leaves it alone."""
    if cpu is not None and hasattr(os, "sched_setaffinity"):
        others = os.sched_getaffinity(os.getpid()) - {_allowed_cpu(cpu)}
        if others:
            os.sched_setaffinity(0, others)


def pin_sockets(cpu: int | None) -> None:
    """Keep ZeroMQ's own thread of this process on one CPU as well; call before the first socket.

    Every message passes through it: on another CPU it has to be woken up each time.
    """
    if cpu is not None and hasattr(os, "sched_setaffinity"):
        zmq.Context.instance().set(zmq.THREAD_AFFINITY_CPU_ADD, _allowed_cpu(cpu))


def _allowed_cpu(index: int) -> int:
    # The main thread's: this one may be pinned already.
    allowed = sorted(os.sched_getaffinity(os.getpid()))
    return allowed[index % len(allowed)]


class Inbound:
    """A blocking PULL socket. Owner: the thread that receives.

    Args:
        kind: ``ipc`` or ``tcp``.
        spin_ms: how long ``receive`` looks for a message, yielding the CPU each time, before it
            sleeps. A step is back within milliseconds; a sleeping virtual CPU takes a good part of one
            to wake up and finds its caches cold.
    """

    def __init__(self, kind: str, spin_ms: float) -> None:
        self._spin_s = spin_ms * 1e-3
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self.address = bind_inbound(self._socket, kind)
        except BaseException:
            self._socket.close()
            raise

    def receive(self, timeout_ms: int) -> Message | None:
        """Wait for one multipart message; None after ``timeout_ms`` of sleep."""
        deadline = time.perf_counter() + self._spin_s
        while not self._socket.poll(0):
            if time.perf_counter() >= deadline:
                if not self._socket.poll(timeout_ms):
                    return None
                break
            os.sched_yield()
        parts: Message = self._socket.recv_multipart()
        return parts

    def waiting(self, most: int) -> list[Message]:
        """Return up to ``most`` further messages that are here already."""
        found: list[Message] = []
        while len(found) < most and self._socket.poll(0):
            found.append(self._socket.recv_multipart())
        return found

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class Outbound:
    """A PUSH socket to one peer. Owner: the thread that sends."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)

    def send(self, parts: Message) -> None:
        """Send without blocking.

        Raises:
            EngineUnavailableError: the peer does not take messages.
        """
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again as error:
            raise EngineUnavailableError("a peer process does not take control messages") from error

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class LinkStage(ABC):
    """A thread that takes messages from a socket of its own, and computes with torch.

    Owner: who makes it; nobody else may stop it. Sockets belong to the thread, which opens and closes them.

    Invariants:
        ``address`` is where it listens, from the end of the constructor on, and never changes
        a thread that has ended, stopped or failed, does not start again

    Subclasses call ``_start`` at the end of their constructor, and say in ``_serve`` what a message does.

    Args:
        name: of the thread.
        link: how to listen.
        num_threads: torch threads.
    """

    def __init__(self, name: str, link: LinkArgs, num_threads: int) -> None:
        self._link = link
        self._num_threads = num_threads
        self._stopped = threading.Event()
        self._began = threading.Event()
        self._refusal: BaseException | None = None
        self.address = ""
        self._thread = threading.Thread(target=self._listen, name=name, daemon=True)

    def is_alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the thread and close its sockets."""
        self._stopped.set()
        self._thread.join(timeout=10)

    def _start(self) -> None:
        """Return when the thread listens.

        Raises:
            EngineUnavailableError: it cannot.
        """
        self._thread.start()
        self._began.wait()
        if self._refusal is not None:
            name, why = self._thread.name, self._refusal
            raise EngineUnavailableError(f"the {name} thread cannot listen: {why}") from why

    def _listen(self) -> None:
        try:
            inbound = self._open()
        except BaseException as error:
            self._refusal = error
            return
        finally:
            self._began.set()
        try:
            self._serve(inbound)
        finally:
            inbound.close()

    def _open(self) -> Inbound:
        import torch  # only stages need it

        # OpenMP's thread count belongs to the calling thread, so it is set here and not in __init__.
        torch.set_num_threads(self._num_threads)
        pin_sockets(self._link.pin_cpu)
        pin_thread(self._link.pin_cpu)
        inbound = Inbound(self._link.kind, self._link.spin_ms)
        self.address = inbound.address
        return inbound

    def _messages(self, inbound: Inbound) -> Iterator[Message]:
        """One message after another, as they come, until the stage is stopped."""
        while not self._stopped.is_set():
            message = inbound.receive(POLL_MS)
            if message is not None:
                yield message

    @abstractmethod
    def _serve(self, inbound: Inbound) -> None:
        """Handle ``_messages``; the thread ends with it."""
