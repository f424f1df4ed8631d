"""Token frames: one ZeroMQ stream per (coordinator, gateway) pair, one message per step."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

import zmq
import zmq.asyncio

from dflash_wire.codec import decode_chunks, encode_chunks
from dflash_wire.errors import EngineUnavailableError
from dflash_wire.records import TokenChunk
from services.links import Outbound, bind_inbound

MAX_GATEWAYS = 64


class FrameSender:
    """``TokenSink`` that pushes frames to gateways. Owner: the coordinator's thread.

    A gateway that does not take frames loses them: its requests are cancelled through their Serve
    calls, so nothing waits for it here.
    """

    def __init__(self) -> None:
        self._peers: OrderedDict[str, Outbound] = OrderedDict()

    def publish(self, chunks: dict[str, list[TokenChunk]]) -> None:
        """Send one frame per gateway; never blocks."""
        for address, mine in chunks.items():
            with contextlib.suppress(EngineUnavailableError):
                self._peer(address).send([encode_chunks(mine)])

    def _peer(self, address: str) -> Outbound:
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = Outbound(address)
            if len(self._peers) > MAX_GATEWAYS:
                _, oldest = self._peers.popitem(last=False)
                oldest.close()
        self._peers.move_to_end(address)
        return peer


class FrameReceiver:
    """A gateway's end: hands chunks to the requests that wait for them.

    Owner: the gateway's event loop; everything here runs in it. The socket is bound on first use,
    because that is when the loop exists.
    """

    def __init__(self, link_kind: str) -> None:
        self._link_kind = link_kind
        self._queues: dict[str, asyncio.Queue[Any]] = {}
        self._task: asyncio.Task[None] | None = None
        self.address = ""

    def start(self) -> None:
        """Bind and read in the background; later calls do nothing."""
        if self._task is not None:
            return
        socket = zmq.asyncio.Context.instance().socket(zmq.PULL)
        socket.setsockopt(zmq.LINGER, 0)
        self.address = bind_inbound(socket, self._link_kind)
        self._task = asyncio.get_running_loop().create_task(self._read(socket))
        self._task.add_done_callback(lambda _: socket.close())

    @contextlib.asynccontextmanager
    async def queue_of(self, request_id: str) -> AsyncIterator[asyncio.Queue[Any]]:
        """The queue of one request for as long as the context lasts; later chunks are dropped."""
        queue: asyncio.Queue[Any] = asyncio.Queue()
        self._queues[request_id] = queue
        try:
            yield queue
        finally:
            del self._queues[request_id]

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            (frame,) = await socket.recv_multipart()
            for chunk in decode_chunks(frame):
                queue = self._queues.get(chunk.request_id)
                if queue is not None:
                    queue.put_nowait(chunk)
