"""Token frames from the coordinator's thread into a gateway's event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest

from dflash_wire.records import CycleStats, TokenChunk
from services import frames
from services.frames import FrameReceiver, FrameSender

pytestmark = pytest.mark.unit

TIMEOUT_S = 30


@contextlib.asynccontextmanager
async def started(kind: str = "ipc") -> AsyncIterator[FrameReceiver]:
    receiver = FrameReceiver(kind)
    receiver.start()
    try:
        yield receiver
    finally:
        assert receiver._task is not None
        receiver._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await receiver._task


@pytest.fixture
def sender() -> Iterator[FrameSender]:
    sender = FrameSender()
    yield sender
    for peer in sender._peers.values():
        peer.close()


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
            address, task = receiver.address, receiver._task
            receiver.start()
            assert (receiver.address, receiver._task) == (address, task)

    asyncio.run(scenario())


def test_a_gateway_that_takes_nothing_loses_frames_only(sender: FrameSender) -> None:
    """The others get theirs, however long one has been dead."""

    async def scenario() -> None:
        async with started() as receiver, receiver.queue_of("r") as queue:
            dead = "ipc://@dflash-test-nobody"
            for i in range(1500):  # more than a socket queues
                sender.publish({dead: [TokenChunk("x", [i])]})
            sender.publish({dead: [TokenChunk("x", [0])], receiver.address: [TokenChunk("r", [4])]})
            assert await take(queue, 1) == [TokenChunk("r", [4])]

    asyncio.run(scenario())


def test_the_longest_unused_peer_is_closed(
    sender: FrameSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "MAX_GATEWAYS", 2)
    for name in ("a", "b", "a", "c"):
        sender.publish({f"ipc://@dflash-test-{name}": [TokenChunk("x", [1])]})
    assert [address[-1] for address in sender._peers] == ["a", "c"]
