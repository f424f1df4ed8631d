"""How the Serve calls of a coordinator end."""

from __future__ import annotations

import asyncio
import errno

import pytest
import zmq

from dflash_wire.errors import FatalError, error_to_wire
from dflash_wire.records import GenerationRequest, TokenChunk
from services.coordinator_deployment import CompletionSink
from services.frames import FrameSender

pytestmark = pytest.mark.unit

LAST = [
    TokenChunk("r", [1], finish_reason="stop"),
    TokenChunk("r", [], error=error_to_wire(FatalError("lost"))),
]


@pytest.mark.parametrize("chunk", LAST)
def test_a_call_ends_even_if_its_last_frame_cannot_be_sent(
    chunk: TokenChunk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its pages are free and its client waits for ever."""

    def refuse(sender: FrameSender, chunks: dict[str, list[TokenChunk]]) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(FrameSender, "publish", refuse)

    async def scenario() -> None:
        sink = CompletionSink()
        ended = sink.register(GenerationRequest("r", [5], 9, frame_address="a"))
        with pytest.raises(zmq.ZMQError):
            sink.publish({"a": [chunk]})
        await asyncio.wait_for(ended.wait(), 10)

    asyncio.run(scenario())


def test_a_call_whose_request_goes_on_stays_open() -> None:
    async def scenario() -> None:
        sink = CompletionSink()
        ended = sink.register(GenerationRequest("r", [5], 9, frame_address=""))
        sink._frames.publish = lambda chunks: None  # type: ignore[method-assign]
        sink.publish({"": [TokenChunk("r", [1])]})
        await asyncio.sleep(0)
        assert not ended.is_set()

    asyncio.run(scenario())
