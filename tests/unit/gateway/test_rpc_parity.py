"""Every field of gRPC's request is the HTTP field of that name: same requests, numbers and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from gateway_fakes import Item, Serve, Served, cycle

from dflash_wire.errors import DFlashError
from dflash_wire.processors import TokenLogprobs
from dflash_wire.records import GenerationRequest
from dflash_wire.v1 import generation_pb2 as pb
from gateway.chat_tokenizer import ChatTokenizer
from gateway.rpc_service import GenerationService
from gateway.state import GatewaySettings, GatewayState

pytestmark = pytest.mark.asyncio

MODEL = "demo/model"
HI = pb.Conversation(messages=[pb.ChatMessage(role="user", content="hi")])
PROCESSORS: dict[str, Any] = {
    **{"min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "min_tokens": 2},
    **{"repetition_penalty": 1.2, "bad_words": ["fox", "dog"], "allowed_token_ids": [5, 6, 7]},
}
OUTPUT = [20, 21, 22, 23, 24, 25, 26]


def said(token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    top = [-0.25 * (1 + rank) for rank in range(num_top)]
    return [TokenLogprobs(-0.5 - i, list(range(5, 5 + num_top)), top) for i in token_ids]


def script(request: GenerationRequest) -> Iterator[Item]:
    for start in range(0, len(OUTPUT), 3):
        chunk = cycle(OUTPUT[start : start + 3], "length" if start == 6 else None)
        if request.num_logprobs is not None:
            chunk.logprobs = said(chunk.token_ids, request.num_logprobs)
        if start == 0 and request.num_prompt_logprobs is not None:
            chunk.prompt_logprobs = said(request.prompt_token_ids[1:], request.num_prompt_logprobs)
        yield chunk


@pytest.fixture
def served(serve: Serve) -> Served:
    return serve(script)


@pytest.fixture
def service(
    served: Served, tokenizer: ChatTokenizer, settings: GatewaySettings
) -> GenerationService:
    state = GatewayState(served.engine, tokenizer, settings)
    return GenerationService(lambda: state, served.metrics)


REQUESTS = [
    (
        pb.GenerateRequest(
            model=MODEL,
            prompt="hi",
            seed=1,
            logit_bias={5: 1.5, 9: -100},
            dflash=pb.DFlashOptions(sampling="rejection", stats=True),
            **PROCESSORS,
        ),
        "complete",
        {
            "seed": 1,
            "logit_bias": {"5": 1.5, "9": -100},
            "dflash": {"sampling": "rejection", "stats": True},
            **PROCESSORS,
        },
    ),
    (
        pb.GenerateRequest(model=MODEL, conversation=HI, seed=2, logprobs=2, prompt_logprobs=1),
        "chat",
        {"seed": 2, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1},
    ),
    (
        pb.GenerateRequest(model=MODEL, conversation=HI, seed=2, logprobs=0, n=2),
        "chat",
        {"seed": 2, "logprobs": True, "n": 2},
    ),
    (
        pb.GenerateRequest(
            model=MODEL, prompt="the fox", seed=3, logprobs=3, echo=True, return_token_ids=True
        ),
        "complete",
        {
            **{"prompt": "the fox", "seed": 3, "logprobs": 3, "echo": True},
            "return_token_ids": True,
        },
    ),
    (
        pb.GenerateRequest(model=MODEL, prompt="the fox", seed=3, prompt_logprobs=2, n=2),
        "complete",
        {"prompt": "the fox", "seed": 3, "prompt_logprobs": 2, "n": 2},
    ),
]


@pytest.mark.parametrize(("message", "endpoint", "fields"), REQUESTS)
async def test_the_engine_is_asked_the_same(
    message: pb.GenerateRequest,
    endpoint: str,
    fields: dict[str, Any],
    served: Served,
    service: GenerationService,
) -> None:
    answer = await service.generate(message)
    mine = [replace(request, request_id="") for request in served.engine.requests]
    served.engine.requests.clear()
    plain = (await getattr(served, endpoint)(**fields)).json()
    assert mine == [replace(request, request_id="") for request in served.engine.requests]
    for choice, expected in zip(answer.choices, plain["choices"], strict=True):
        assert choice.text == (expected.get("text") or expected["message"]["content"])
        check_logprobs(choice.logprobs, expected["logprobs"])
    expected_prompt = plain.get("prompt_logprobs") or plain["choices"][0].get("prompt_logprobs")
    check_prompt(answer.prompt_logprobs, expected_prompt)
    stats = [plain["dflash"]] if "dflash" in plain else []
    assert [one.sampling for one in answer.stats] == [one.get("sampling", "") for one in stats]


def check_logprobs(told: Any, expected: dict[str, Any] | None) -> None:
    """Compare with ``logprobs`` of a chat (objects) or of a text completion (parallel lists)."""
    if expected is None:
        assert not told
        return
    mine = [entry.logprob if entry.HasField("logprob") else None for entry in told]
    texts = [entry.token.decode(errors="replace") for entry in told]
    if "content" in expected:
        assert mine == [entry["logprob"] for entry in expected["content"]]
        assert [list(entry.token) for entry in told] == [e["bytes"] for e in expected["content"]]
        for entry, other in zip(told, expected["content"], strict=True):
            tops = [(list(top.token), top.logprob) for top in entry.top]
            assert tops == [(top["bytes"], top["logprob"]) for top in other["top_logprobs"]]
        return
    assert mine == expected["token_logprobs"]
    assert texts == expected["tokens"]
    for entry, tops in zip(told, expected["top_logprobs"], strict=True):
        for top in entry.top:
            assert tops[top.token.decode(errors="replace")] == top.logprob


def check_prompt(told: Any, expected: list[dict[str, Any] | None] | None) -> None:
    if expected is None:
        assert not told
        return
    assert not told[0].HasField("logprob") and expected[0] is None
    for entry, other in zip(told[1:], expected[1:], strict=True):
        assert other is not None
        assert entry.logprob == other[str(entry.token_id)]["logprob"]
        for rank, top in enumerate(entry.top):
            assert other[str(top.token_id)]["logprob"] == top.logprob
            assert other[str(top.token_id)]["rank"] == rank + 1


@pytest.mark.parametrize(("message", "endpoint", "fields"), REQUESTS)
async def test_a_stream_adds_up_to_the_whole(
    message: pb.GenerateRequest,
    endpoint: str,
    fields: dict[str, Any],
    service: GenerationService,
) -> None:
    whole = await service.generate(message)
    chunks = [chunk async for chunk in service.generate_stream(message)]
    for choice in whole.choices:
        mine = [chunk for chunk in chunks if chunk.index == choice.index]
        assert [entry for chunk in mine for entry in chunk.logprobs] == list(choice.logprobs)
    told = [entry for chunk in chunks for entry in chunk.prompt_logprobs]
    assert told == list(whole.prompt_logprobs)
    assert [i for chunk in chunks for i in chunk.prompt_token_ids] == list(whole.prompt_token_ids)
    assert bool(whole.prompt_token_ids) == message.return_token_ids


REFUSED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"min_p": 2.0}, {"min_p": 2.0}),
    ({"presence_penalty": 3.0}, {"presence_penalty": 3.0}),
    ({"frequency_penalty": -3.0}, {"frequency_penalty": -3.0}),
    ({"repetition_penalty": 0.0}, {"repetition_penalty": 0.0}),
    ({"logit_bias": {5: 101.0}}, {"logit_bias": {"5": 101.0}}),
    ({"logit_bias": {330: 1.0}}, {"logit_bias": {"330": 1.0}}),
    ({"logit_bias": {-1: 1.0}}, {"logit_bias": {"-1": 1.0}}),
    ({"bad_words": [" "]}, {"bad_words": [" "]}),
    ({"allowed_token_ids": [330]}, {"allowed_token_ids": [330]}),
    ({"min_tokens": -1}, {"min_tokens": -1}),
    ({"min_tokens": 9, "max_tokens": 8}, {"min_tokens": 9, "max_tokens": 8}),
    ({"logprobs": 21}, {"logprobs": 21}),
    ({"logprobs": -1}, {"logprobs": -1}),
    ({"prompt_logprobs": 21}, {"prompt_logprobs": 21}),
    ({"seed": 1, "stop": ["a"] * 5}, {"seed": 1, "stop": ["a"] * 5}),
    ({"n": 5}, {"n": 5}),
    ({"priority": 1, "cache_salt": ""}, {"priority": 1, "cache_salt": ""}),
    ({"dflash": pb.DFlashOptions(sampling="x")}, {"dflash": {"sampling": "x"}}),
    ({"dflash": pb.DFlashOptions(policy="static:99")}, {"dflash": {"policy": "static:99"}}),
    ({"dflash": pb.DFlashOptions(drafter="none")}, {"dflash": {"drafter": "none"}}),
    ({"more_json": '{"best_of": 2}'}, {"best_of": 2}),
    ({"more_json": '{"lora_name": "a"}'}, {"lora_name": "a"}),
]


@pytest.mark.parametrize(("fields", "plain"), REFUSED)
async def test_the_same_is_refused_with_the_same_code(
    fields: dict[str, Any], plain: dict[str, Any], served: Served, service: GenerationService
) -> None:
    with pytest.raises(DFlashError) as caught:
        await service.generate(pb.GenerateRequest(model=MODEL, prompt="hi", **fields))
    refused = await served.complete(**plain)
    assert refused.status_code == caught.value.status
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == (caught.value.code, caught.value.param)
    assert error["message"] == caught.value.message
    assert served.engine.requests == []


async def test_echo_is_of_prompts_alone(served: Served, service: GenerationService) -> None:
    with pytest.raises(DFlashError) as caught:
        await service.generate(pb.GenerateRequest(model=MODEL, conversation=HI, echo=True))
    refused = (await served.chat(echo=True)).json()["error"]
    assert refused["code"] == caught.value.code == "unsupported_parameter"


async def test_no_field_of_the_request_is_left_out_here() -> None:
    """A field added to the message must be added to a test: most are set above, the rest in ``test_rpc``."""
    set_here = {field.name for message, *_ in REQUESTS for field, _ in message.ListFields()}
    elsewhere = {
        *("prompt_token_ids", "max_tokens", "temperature", "top_p", "top_k", "stop"),
        *("stop_token_ids", "ignore_eos", "include_stop_str_in_output", "priority"),
        *("cache_salt", "user", "tools", "tool_choice", "parallel_tool_calls"),
        *("enable_thinking", "more_json"),
    }
    everything = {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields}
    assert everything - set_here - elsewhere == set()
