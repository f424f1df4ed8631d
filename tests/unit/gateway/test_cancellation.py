from __future__ import annotations

import asyncio

import pytest
from gateway_fakes import AsgiCall, Encode, Serve, last

from gateway.metrics import GatewayMetrics

pytestmark = pytest.mark.asyncio

NEVER = asyncio.Event


def body(**fields: object) -> dict[str, object]:
    return {"model": "demo/model", "prompt": "hi", **fields}


async def next_write(call: AsgiCall) -> bytes:
    while True:
        message = await asyncio.wait_for(call.writes.get(), 5)
        if message["type"] == "http.response.body":
            return message["body"]


def text_of(metrics: GatewayMetrics) -> str:
    return metrics.render().decode()


async def test_hanging_up_a_stream_closes_the_engine(serve: Serve, encode: Encode) -> None:
    served = serve([encode("the"), NEVER(), last(encode(" fox"))])
    call = AsgiCall(served.app, "/v1/completions", body(stream=True))
    assert b"the" in await next_write(call)
    assert served.engine.num_open == 1
    call.hang_up()
    await asyncio.wait_for(call.task, 5)
    assert served.engine.num_open == 0
    assert call.writes.empty()
    assert "dflash_requests_running 0.0" in text_of(served.metrics)


async def test_hanging_up_before_the_first_token(serve: Serve) -> None:
    served = serve([NEVER()])
    call = AsgiCall(served.app, "/v1/completions", body(stream=True))
    await asyncio.wait_for(served.engine.opened.wait(), 5)
    call.hang_up()
    await asyncio.wait_for(call.task, 5)
    assert served.engine.num_open == 0
    assert 'endpoint="/v1/completions",status="499"} 1.0' in text_of(served.metrics)


async def test_hanging_up_without_streaming(serve: Serve, encode: Encode) -> None:
    served = serve([encode("the"), NEVER()])
    call = AsgiCall(served.app, "/v1/completions", body())
    await asyncio.wait_for(served.engine.opened.wait(), 5)
    call.hang_up()
    await asyncio.wait_for(call.task, 5)
    assert served.engine.num_open == 0
    assert 'endpoint="/v1/completions",status="499"} 1.0' in text_of(served.metrics)


@pytest.mark.parametrize("stream", [False, True])
async def test_hanging_up_closes_all_prompts(
    serve: Serve, encode: Encode, stream: bool | None
) -> None:
    served = serve(lambda _: [encode("the"), NEVER()])
    call = AsgiCall(served.app, "/v1/completions", body(prompt=["a", "b", "c"], stream=stream))
    while served.engine.num_yielded < 3:
        await asyncio.sleep(0)
    call.hang_up()
    await asyncio.wait_for(call.task, 5)
    assert served.engine.num_open == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_cancelling_the_request_task(
    serve: Serve, encode: Encode, stream: bool | None
) -> None:
    served = serve([encode("the"), NEVER()])
    call = AsgiCall(served.app, "/v1/completions", body(stream=stream))
    await asyncio.wait_for(served.engine.opened.wait(), 5)
    call.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(call.task, 5)
    assert served.engine.num_open == 0


async def test_a_failing_write_closes_the_engine(serve: Serve, encode: Encode) -> None:
    gate = asyncio.Event()
    served = serve([encode("the"), gate, encode(" quick"), NEVER()])
    call = AsgiCall(served.app, "/v1/completions", body(stream=True))
    await next_write(call)
    call.is_closed = True
    assert served.engine.num_open == 1
    gate.set()
    await asyncio.wait_for(call.task, 5)
    assert served.engine.num_open == 0


async def test_a_stop_string_closes_the_engine_before_the_last_event(
    serve: Serve, encode: Encode
) -> None:
    served = serve([encode("the quick"), NEVER()])
    seen: list[int] = []

    class Watched(AsgiCall):
        async def _send(self, message: dict[str, object]) -> None:
            if b'"finish_reason":"stop"' in message.get("body", b""):
                seen.append(served.engine.num_open)

    call = Watched(served.app, "/v1/completions", body(stream=True, stop="quick"))
    await asyncio.wait_for(call.task, 5)
    assert seen == [0]


async def test_each_chunk_is_written_before_the_next_exists(serve: Serve, encode: Encode) -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    served = serve([encode("one"), gates[0], encode(" two three"), gates[1], last([])])
    call = AsgiCall(served.app, "/v1/completions", body(stream=True))
    assert b'"text":"one"' in await next_write(call)
    assert call.writes.empty()
    gates[0].set()
    assert b'"text":" two three"' in await next_write(call)
    gates[1].set()
    assert b'"finish_reason":"stop"' in await next_write(call)
    assert await next_write(call) == b"data: [DONE]\n\n"
    await asyncio.wait_for(call.task, 5)
