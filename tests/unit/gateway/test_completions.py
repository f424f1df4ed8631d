from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from gateway_fakes import AsgiCall, Encode, Item, Script, Serve, last, sse_data

from dflash_wire.errors import OverloadedError
from dflash_wire.records import GenerationRequest
from gateway import generation

pytestmark = pytest.mark.asyncio


async def test_openai_client_whole(serve: Serve, encode: Encode) -> None:
    served = serve([encode("the quick"), last(encode(" fox"), "length")])
    answer = await served.openai.completions.create(model="demo/model", prompt="one two")
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == "the quick fox"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len(encode("one two"))
    assert served.engine.requests[0].prompt_token_ids == encode("one two")


async def test_openai_client_stream(serve: Serve, encode: Encode) -> None:
    served = serve([encode("the quick"), last(encode(" fox"))])
    stream = await served.openai.completions.create(model="demo/model", prompt="hi", stream=True)
    choices = [chunk.choices[0] async for chunk in stream]
    assert [choice.text for choice in choices] == ["the quick", " fox", ""]
    assert [choice.finish_reason for choice in choices] == [None, None, "stop"]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        (["one", "two"], ["one", "two"]),
        ("one", ["one"]),
    ],
)
async def test_prompt_forms(
    prompt: object, expected: list[object], serve: Serve, encode: Encode
) -> None:
    served = serve(lambda _: [last([])])
    response = await served.complete(prompt=prompt)
    assert response.status_code == 200
    got = [request.prompt_token_ids for request in served.engine.requests]
    assert got == [encode(item) if isinstance(item, str) else item for item in expected]


def scripts_by_prompt(encode: Encode, gate: asyncio.Event) -> Script:
    """Prompt 5 waits in the middle until prompt 6 is through."""

    def script(request: GenerationRequest) -> list[Item]:
        if request.prompt_token_ids == [5]:
            return [encode("one"), gate, last(encode(" two"))]
        return [encode("three"), last(encode(" four"), "length")]

    return script


async def test_several_prompts_run_at_the_same_time(serve: Serve, encode: Encode) -> None:
    gate = asyncio.Event()
    served = serve(scripts_by_prompt(encode, gate))
    call = asyncio.create_task(
        served.complete(prompt=[[5], [6, 6]], dflash={"stats": True}, max_tokens=9)
    )
    while len(served.engine.requests) < 2:
        await asyncio.sleep(0)
    gate.set()
    body = (await call).json()
    assert [choice["text"] for choice in body["choices"]] == ["one two", "three four"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length"]
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == len(encode("one two")) + len(encode("three four"))
    seeds = [request.sampling.seed for request in served.engine.requests]
    assert [stats["seed"] for stats in body["dflash"]] == seeds
    assert seeds[0] != seeds[1]


async def test_several_prompts_stream_interleaved(serve: Serve, encode: Encode) -> None:
    gate = asyncio.Event()
    served = serve(scripts_by_prompt(encode, gate))
    body = {
        "model": "demo/model",
        "prompt": [[5], [6, 6]],
        "stream": True,
        "dflash": {"stats": True},
    }
    call = AsgiCall(served.app, "/v1/completions", body)
    text = ""
    while text.count('"finish_reason":"length"') == 0:
        text += (await call.writes.get()).get("body", b"").decode()
    gate.set()
    await call.task
    while not call.writes.empty():
        text += call.writes.get_nowait().get("body", b"").decode()
    *chunks, done = sse_data(text)
    assert done == "[DONE]"
    by_index = {
        index: "".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == index)
        for index in (0, 1)
    }
    assert by_index == {0: "one two", 1: "three four"}
    assert chunks[-1]["choices"][0]["index"] == 0
    assert [len(chunk.get("dflash", [])) for chunk in chunks] == [0] * (len(chunks) - 1) + [2]


async def test_a_failing_prompt_ends_the_others(serve: Serve, encode: Encode) -> None:
    never = asyncio.Event()

    def script(request: GenerationRequest) -> list[Item]:
        if request.prompt_token_ids == [5]:
            return [encode("one"), never]
        return [encode("three"), ValueError("broken")]

    served = serve(script)
    response = await served.complete(prompt=[[5], [6]])
    assert response.status_code == 500
    assert served.engine.num_open == 0


async def test_stop_strings_per_choice(serve: Serve, encode: Encode) -> None:
    def script(request: GenerationRequest) -> list[Item]:
        text = "one two" if request.prompt_token_ids == [5] else "three four"
        return [last(encode(text), "length")]

    body = (await serve(script).complete(prompt=[[5], [6]], stop=" two")).json()
    assert [choice["text"] for choice in body["choices"]] == ["one", "three four"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length"]


@pytest.fixture
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "FIRST_DELAY_S", 0.0)


@pytest.mark.usefixtures("no_delay")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_refused_behind_others_that_run_waits_for_its_turn(
    serve: Serve, encode: Encode, stream: bool
) -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()
    num_refused = 0

    def first() -> Iterator[Item]:
        yield encode("x")
        begun.set()  # asked for more, so that is out
        yield may_end
        yield last(encode("y"))

    def second() -> Iterator[Item]:
        nonlocal num_refused
        yield begun
        if num_refused < 3:
            num_refused += 1
            yield OverloadedError("full")
        may_end.set()
        yield last(encode("z"))

    def script(request: GenerationRequest) -> Iterator[Item]:
        return first() if request.prompt_token_ids == encode("a") else second()

    served = serve(script)
    response = await served.complete(prompt=["a", "b"], stream=stream)
    assert response.status_code == 200
    assert "overloaded" not in response.text
    assert num_refused == 3
    assert served.engine.num_open == 0


async def test_a_prompt_refused_before_any_has_begun_refuses_the_request(
    serve: Serve, encode: Encode
) -> None:
    def script(request: GenerationRequest) -> list[Item]:
        if request.prompt_token_ids == encode("b"):
            return [OverloadedError("full")]
        return [asyncio.Event()]

    served = serve(script)
    response = await served.complete(prompt=["a", "b"], stream=True)
    assert response.status_code == 429
    assert served.engine.num_open == 0


@pytest.mark.usefixtures("no_delay")
async def test_patience_ends(serve: Serve, encode: Encode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MOST_PATIENCE_S", 0.0)
    begun = asyncio.Event()

    def first() -> Iterator[Item]:
        yield encode("x")
        begun.set()
        yield asyncio.Event()

    def script(request: GenerationRequest) -> Iterator[Item]:
        if request.prompt_token_ids == encode("a"):
            return first()
        return iter([begun, OverloadedError("full")])

    response = await serve(script).complete(prompt=["a", "b"])
    assert response.status_code == 429
