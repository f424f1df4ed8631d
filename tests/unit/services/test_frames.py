"""Token frames from the coordinator's thread into a gateway's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import zmq

from dflash_wire.codec import decode_chunks
from dflash_wire.records import CycleStats, TokenChunk
from services import frames
from services.frames import FrameReceiver, FrameSender
from services.links import bind_inbound

pytestmark = pytest.mark.unit

TIMEOUT_S = 30


@contextlib.asynccontextmanager
async def started(kind: str = "ipc") -> AsyncIterator[FrameReceiver]:
    receiver = FrameReceiver(kind)
    receiver.start()
    try:
        yield receiver
    finally:
        receiver.close()


@pytest.fixture
def lost() -> list[str]:
    return []


@pytest.fixture
def sender(lost: list[str]) -> Iterator[FrameSender]:
    sender = FrameSender(lost.append)
    yield sender
    sender.close()


def publish_until_lost(sender: FrameSender, address: str, lost: list[str]) -> None:
    """A monitor's event comes from another thread, so the first frames may still be queued."""
    deadline = time.monotonic() + TIMEOUT_S
    while not lost and time.monotonic() < deadline:
        sender.publish({address: [TokenChunk("x", [1])]})


async def take(queue: asyncio.Queue[TokenChunk], count: int) -> list[TokenChunk]:
    return [await asyncio.wait_for(queue.get(), TIMEOUT_S) for _ in range(count)]


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_chunks_reach_the_requests_that_wait(sender: FrameSender, kind: str) -> None:
    last = TokenChunk("a", [3], "stop", CycleStats(0, 0, 1, 0.5, 1.5, 0.1))
    failed = TokenChunk("b", [], error={"code": "engine_failed", "message": "m", "param": None})

    async def scenario() -> None:
        async with (
            started(kind) as receiver,
            receiver.queue_of("a") as first,
            receiver.queue_of("b") as second,
        ):
            address = receiver.address
            await asyncio.to_thread(
                sender.publish, {address: [TokenChunk("a", [1, 2]), TokenChunk("b", [9])]}
            )
            sender.publish({address: [last, TokenChunk("nobody", [5]), failed]})
            assert await take(first, 2) == [TokenChunk("a", [1, 2]), last]
            assert await take(second, 2) == [TokenChunk("b", [9]), failed]
            assert first.empty() and second.empty()

    asyncio.run(scenario())


def test_each_gateway_gets_its_own(sender: FrameSender) -> None:
    async def scenario() -> None:
        async with (
            started() as one,
            started() as two,
            one.queue_of("r") as first,
            two.queue_of("r") as second,
        ):
            sender.publish(
                {one.address: [TokenChunk("r", [1])], two.address: [TokenChunk("r", [2])]}
            )
            assert await take(first, 1) == [TokenChunk("r", [1])]
            assert await take(second, 1) == [TokenChunk("r", [2])]

    asyncio.run(scenario())


def test_chunks_after_the_end_are_dropped(sender: FrameSender) -> None:
    async def scenario() -> None:
        async with started() as receiver:
            async with receiver.queue_of("gone"):
                pass
            assert receiver._queues == {}
            async with receiver.queue_of("here") as queue:
                chunks = [TokenChunk("gone", [1]), TokenChunk("here", [2])]
                sender.publish({receiver.address: chunks})
                assert await take(queue, 1) == [TokenChunk("here", [2])]

    asyncio.run(scenario())


def test_start_twice_binds_once() -> None:
    async def scenario() -> None:
        async with started() as receiver:
            address, socket = receiver.address, receiver._socket
            receiver.start()
            assert (receiver.address, receiver._socket) == (address, socket)

    asyncio.run(scenario())


def test_a_gateway_that_stalls_loses_nothing(sender: FrameSender, lost: list[str]) -> None:
    """More than sockets and kernels buffer by default; the event loop does not read meanwhile."""
    count, tokens = 6000, list(range(100))

    async def scenario() -> None:
        async with started() as receiver, receiver.queue_of("r") as queue:
            for i in range(count):
                sender.publish({receiver.address: [TokenChunk("r", tokens, num_before=i)]})
            chunks = await take(queue, count)
            assert [chunk.num_before for chunk in chunks] == list(range(count))

    asyncio.run(scenario())
    assert lost == []


def test_a_process_that_stands_still_loses_nothing(sender: FrameSender) -> None:
    """Nothing takes the frames out of the socket, as when the whole process is stopped."""
    socket = zmq.Context.instance().socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, 1)
    address, count = bind_inbound(socket, "ipc"), 6000
    tokens = list(range(100))

    def publish_all() -> None:
        for i in range(count):
            sender.publish({address: [TokenChunk("r", tokens, num_before=i)]})

    publishing = threading.Thread(target=publish_all, daemon=True)
    publishing.start()
    publishing.join(TIMEOUT_S)
    assert not publishing.is_alive(), "publishing must never wait for a gateway"
    received = [decode_chunks(socket.recv())[0].num_before for _ in range(count)]
    assert received == list(range(count))
    socket.close()


def test_a_gateway_that_nobody_hears_is_reported(sender: FrameSender, lost: list[str]) -> None:
    dead = "ipc://@dflash-test-nobody"
    publish_until_lost(sender, dead, lost)
    assert lost == [dead]
    assert sender._peers == {}


def test_a_gateway_that_goes_away_is_reported_and_no_other(
    sender: FrameSender, lost: list[str]
) -> None:
    async def scenario() -> None:
        async with started() as stays, stays.queue_of("r") as queue:
            async with started() as goes, goes.queue_of("r") as other:
                address = goes.address
                sender.publish({address: [TokenChunk("r", [1])]})
                await take(other, 1)
            await asyncio.to_thread(publish_until_lost, sender, address, lost)
            assert lost == [address]
            sender.publish({stays.address: [TokenChunk("r", [4])]})
            assert await take(queue, 1) == [TokenChunk("r", [4])]

    asyncio.run(scenario())
    assert len(lost) == 1


def test_the_longest_unused_peer_is_closed(
    sender: FrameSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "MAX_GATEWAYS", 2)
    monkeypatch.setattr(frames.FrameOutbound, "is_lost", lambda self: False)
    for name in ("a", "b", "a", "c"):
        sender.publish({f"ipc://@dflash-test-{name}": [TokenChunk("x", [1])]})
    assert [address[-1] for address in sender._peers] == ["a", "c"]
