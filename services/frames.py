"""Token frames: one ZeroMQ stream per (coordinator, gateway) pair, one message per step."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import zmq

from dflash_wire.codec import decode_chunks, encode_chunks
from dflash_wire.records import TokenChunk
from services.links import bind_inbound

MAX_GATEWAYS = 64
UNLIMITED = 0
# A gateway listens before it sends its first request, so a connection that fails means that it is gone.
LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED


class FrameOutbound:
    """A PUSH socket that never refuses a frame and knows when its peer has gone.

    Owner: the coordinator's thread.
    """

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, UNLIMITED)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(LOST)
        self._socket.connect(address)

    def is_lost(self) -> bool:
        """Whether the peer has closed its end, or there is none."""
        return bool(self._monitor.poll(0))

    def send(self, frame: bytes) -> None:
        """Queue a frame; never blocks."""
        self._socket.send(frame)

    def close(self) -> None:
        """Close the socket; what it has not sent is dropped."""
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()


class FrameSender:
    """``TokenSink`` that pushes frames to gateways. Owner: the coordinator's thread.

    Frames are never dropped: what a slow gateway has not taken yet waits here, at most the tokens of its
    live requests. A gateway that is gone is reported, so that its requests end.

    Args:
        on_lost: called with the address of a gateway that closed its end.
    """

    def __init__(self, on_lost: Callable[[str], None]) -> None:
        self._on_lost = on_lost
        self._peers: OrderedDict[str, FrameOutbound] = OrderedDict()

    def publish(self, chunks: dict[str, list[TokenChunk]]) -> None:
        """Send one frame per gateway; never blocks."""
        for address, mine in chunks.items():
            peer = self._peer(address)
            if peer.is_lost():
                self._drop(address)
                self._on_lost(address)
            else:
                peer.send(encode_chunks(mine))

    def _peer(self, address: str) -> FrameOutbound:
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = FrameOutbound(address)
            if len(self._peers) > MAX_GATEWAYS:
                self._drop(next(iter(self._peers)))
        self._peers.move_to_end(address)
        return peer

    def _drop(self, address: str) -> None:
        self._peers.pop(address).close()

    def close(self) -> None:
        """Close all sockets."""
        for address in list(self._peers):
            self._drop(address)


class ChunkQueue:
    """What comes for one request, in order. Owner: the gateway's event loop; one reader.

    As ``asyncio.Queue``, but without what one reader and no limit do not need: every chunk of every
    stream goes through here.
    """

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put_nowait(self, item: Any) -> None:
        """Add an item and wake the reader."""
        self._items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> Any:
        """Wait for the next item."""
        while not self._items:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._items.popleft()

    def empty(self) -> bool:
        """Whether nothing waits to be read."""
        return not self._items


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))


class FrameReceiver:
    """A gateway's end: hands chunks to the requests that wait for them.

    Owner: the gateway's event loop; everything here runs in it. The socket is bound on first use,
    because that is when the loop exists.
    """

    def __init__(self, link_kind: str) -> None:
        self._link_kind = link_kind
        self._queues: dict[str, ChunkQueue] = {}
        self._socket: zmq.Socket[bytes] | None = None
        self.address = ""

    def start(self) -> None:
        """Bind and read whenever frames come; later calls do nothing."""
        if self._socket is not None:
            return
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, UNLIMITED)
        self.address = bind_inbound(socket, self._link_kind)
        self._socket = socket
        asyncio.get_running_loop().add_reader(_descriptor(socket), self._read)
        # The descriptor tells of changes only, and a frame may have come before anybody looked.
        self._read()

    def close(self) -> None:
        """Stop reading; call in the loop that called ``start``."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(_descriptor(self._socket))
            self._socket.close()
            self._socket = None

    @contextlib.asynccontextmanager
    async def queue_of(self, request_id: str) -> AsyncIterator[ChunkQueue]:
        """The queue of one request for as long as the context lasts; later chunks are dropped."""
        queue = ChunkQueue()
        self._queues[request_id] = queue
        try:
            yield queue
        finally:
            del self._queues[request_id]

    def _read(self) -> None:
        """Hand out all frames that are here, to the last one: the next change is told only then."""
        assert self._socket is not None
        with contextlib.suppress(zmq.Again):
            while True:
                for chunk in decode_chunks(self._socket.recv(zmq.NOBLOCK)):
                    queue = self._queues.get(chunk.request_id)
                    if queue is not None:
                        queue.put_nowait(chunk)
