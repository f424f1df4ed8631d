"""What the gateway makes of a coordinator's chunks and of how its call ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import pytest

from dflash_wire.codec import decode_request
from dflash_wire.errors import (
    EngineUnavailableError,
    InvalidRequestError,
    OverloadedError,
    error_to_wire,
)
from dflash_wire.records import GenerationRequest, TokenChunk
from gateway.routing.prefix_names import prefix_names
from services import serve_engine
from services.frames import FrameSender
from services.route_hints import RouteHints
from services.serve_engine import ServeEngine

pytestmark = pytest.mark.unit

TIMEOUT_S = 30


class ScriptedCall:
    """A handle's response: what it returns or raises is set from outside."""

    def __init__(self) -> None:
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.num_cancels = 0

    def __await__(self) -> Generator[Any, None, Any]:
        return self.future.__await__()

    def cancel(self) -> None:
        self.num_cancels += 1


class ScriptedCoordinator:
    """A handle whose ``generate`` runs ``play`` with the request and the call."""

    def __init__(self, play: Callable[[GenerationRequest, ScriptedCall], None]) -> None:
        self._play = play
        self.calls: list[ScriptedCall] = []
        self.generate = self

    def remote(self, frame: bytes, work: int, prefix: bytes) -> ScriptedCall:
        assert work > 0
        self.calls.append(ScriptedCall())
        self._play(decode_request(frame), self.calls[-1])
        return self.calls[-1]


def read(
    chunks: list[TokenChunk], end: object = None, max_chunks: int | None = None
) -> tuple[list[TokenChunk], int]:
    """Return what a client gets of ``chunks`` when the call ends with ``end``, and the cancels."""
    sender = FrameSender(lambda address: None)

    def play(request: GenerationRequest, call: ScriptedCall) -> None:
        for chunk in chunks:
            chunk.request_id = request.request_id
            sender.publish({request.frame_address: [chunk]})
        if isinstance(end, Exception):
            call.future.set_exception(end)
        elif end is not None:
            call.future.set_result(end if isinstance(end, dict) else None)

    coordinator = ScriptedCoordinator(play)

    async def scenario() -> list[TokenChunk]:
        hints = RouteHints(page_size=16, expected_output_tokens=50)
        engine = ServeEngine(coordinator, "ipc", hints)
        stream = engine.generate(GenerationRequest("r", [5], 9))
        got = []
        try:
            async with contextlib.aclosing(stream):
                async for chunk in stream:
                    got.append(chunk)
                    if len(got) == max_chunks:
                        break
            assert engine._frames._queues == {}
        finally:
            engine.close()
        return got

    try:
        got = asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))
    finally:
        sender.close()
    return got, coordinator.calls[0].num_cancels


def test_chunks_that_follow_each_other_pass() -> None:
    chunks = [TokenChunk("", [1]), TokenChunk("", [2, 3], num_before=1)]
    got, num_cancels = read([*chunks, TokenChunk("", [4], "stop", num_before=3)])
    assert [chunk.token_ids for chunk in got] == [[1], [2, 3], [4]]
    assert {chunk.request_id for chunk in got} == {"r"}
    assert num_cancels == 0


@pytest.mark.parametrize("num_before", [0, 2, 4])
def test_a_hole_is_an_error(num_before: int) -> None:
    with pytest.raises(EngineUnavailableError, match="tokens were lost"):
        read([TokenChunk("", [1]), TokenChunk("", [2, 3], "stop", num_before=num_before)])


def test_an_error_chunk_is_raised() -> None:
    error = error_to_wire(OverloadedError("full"))
    with pytest.raises(OverloadedError, match="full"):
        read([TokenChunk("", [1]), TokenChunk("", [], error=error, num_before=1)])


def test_a_refusal_is_raised() -> None:
    with pytest.raises(InvalidRequestError, match="no"):
        read([], end=error_to_wire(InvalidRequestError("no", "prompt")))


def test_a_reader_that_stops_early_cancels_the_call() -> None:
    got, num_cancels = read([TokenChunk("", [1]), TokenChunk("", [2], num_before=1)], max_chunks=1)
    assert (len(got), num_cancels) == (1, 1)


def test_a_call_that_ended_well_leaves_time_for_its_last_frame() -> None:
    got, _ = read([TokenChunk("", [1]), TokenChunk("", [2], "stop", num_before=1)], end=True)
    assert [chunk.token_ids for chunk in got] == [[1], [2]]


def test_a_last_frame_that_never_comes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_engine, "LAST_FRAME_TIMEOUT_S", 0.01)
    with pytest.raises(EngineUnavailableError, match="last tokens were lost"):
        read([TokenChunk("", [1])], end=True)


def test_hints_tell_the_work_and_the_prefix() -> None:
    hints = RouteHints(page_size=16, expected_output_tokens=50)
    request = GenerationRequest("r", list(range(100)), max_tokens=20, cache_salt="tenant")
    assert hints.of(request) == {"work": 120, "prefix": prefix_names(range(100), "tenant", 16)}
    assert hints.of(replace(request, max_tokens=2000))["work"] == 150
