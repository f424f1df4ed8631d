"""gRPC says what HTTP says: the same answers, the same refusals, the same codes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import grpc
import pytest
from gateway_fakes import Encode, Item, Serve, Served, cycle, last
from tool_models import ADD, HERMES, served_by, tool_tokenizer

from dflash_wire import errors
from dflash_wire.errors import DFlashError, InvalidRequestError
from dflash_wire.records import GenerationRequest
from dflash_wire.v1 import generation_pb2 as pb
from gateway.chat_tokenizer import ChatTokenizer
from gateway.rpc_service import STATUS_OF, GenerationService, status_of
from gateway.state import GatewaySettings, GatewayState

pytestmark = pytest.mark.asyncio

MODEL = "demo/model"
HI = pb.Conversation(messages=[pb.ChatMessage(role="user", content="hi")])


def service_of(
    served: Served, tokenizer: ChatTokenizer, settings: GatewaySettings
) -> GenerationService:
    state = GatewayState(served.engine, tokenizer, settings)
    return GenerationService(lambda: state, served.metrics)


@pytest.fixture
def served(serve: Serve, encode: Encode) -> Served:
    def script(request: GenerationRequest) -> list[Item]:
        return [encode("the "), cycle(encode("quick 😀")), last(encode(" fox"))]

    return serve(script)


@pytest.fixture
def service(
    served: Served, tokenizer: ChatTokenizer, settings: GatewaySettings
) -> GenerationService:
    return service_of(served, tokenizer, settings)


REQUESTS = [
    (pb.GenerateRequest(model=MODEL, conversation=HI, seed=3), "chat", {"seed": 3}),
    (
        pb.GenerateRequest(
            **{"model": MODEL, "prompt": "hi", "temperature": 0.0, "max_tokens": 20, "n": 2},
            stop=["fox"],
            stop_token_ids=[7],
            ignore_eos=True,
            include_stop_str_in_output=True,
            return_token_ids=True,
            priority=-2,
            cache_salt="s",
            user="u",
            top_p=0.5,
            top_k=4,
            seed=2**40,
            dflash=pb.DFlashOptions(policy="off", stats=True),
        ),
        "complete",
        {
            **{"temperature": 0, "max_tokens": 20, "n": 2, "stop": ["fox"], "stop_token_ids": [7]},
            **{"ignore_eos": True, "include_stop_str_in_output": True, "return_token_ids": True},
            **{"priority": -2, "cache_salt": "s", "user": "u", "top_p": 0.5, "top_k": 4},
            **{"seed": 2**40, "dflash": {"policy": "off", "stats": True}},
        },
    ),
    (
        pb.GenerateRequest(model=MODEL, prompt_token_ids=pb.TokenIds(ids=[5, 0, 6]), seed=0),
        "complete",
        {"prompt": [5, 0, 6], "seed": 0},
    ),
]


@pytest.mark.parametrize(("request_message", "endpoint", "fields"), REQUESTS)
async def test_the_engine_gets_the_same_and_the_answer_is_the_same(
    request_message: pb.GenerateRequest,
    endpoint: str,
    fields: dict[str, Any],
    served: Served,
    service: GenerationService,
) -> None:
    answer = await service.generate(request_message)
    mine = served.engine.requests[:]
    served.engine.requests.clear()
    plain = (await getattr(served, endpoint)(**fields)).json()
    assert [without_id(r) for r in mine] == [without_id(r) for r in served.engine.requests]
    assert [choice.text for choice in answer.choices] == [
        choice.get("text") or choice["message"]["content"] for choice in plain["choices"]
    ]
    for choice, expected in zip(answer.choices, plain["choices"], strict=True):
        assert choice.finish_reason == expected["finish_reason"]
        assert list(choice.token_ids) == expected.get("token_ids", [])
    assert answer.usage.completion_tokens == plain["usage"]["completion_tokens"]
    assert answer.usage.total_tokens == plain["usage"]["total_tokens"]
    assert [stats.seed for stats in answer.stats] == [s["seed"] for s in plain.get("dflash", [])]
    assert answer.model == MODEL


def without_id(request: GenerationRequest) -> tuple[object, ...]:
    return (
        request.prompt_token_ids,
        request.max_tokens,
        request.sampling,
        request.stop_token_ids,
        request.policy,
        request.cache_salt,
        request.priority,
        request.drafter,
    )


@pytest.mark.parametrize(("request_message", "endpoint", "fields"), REQUESTS)
async def test_a_stream_adds_up_to_the_whole(
    request_message: pb.GenerateRequest,
    endpoint: str,
    fields: dict[str, Any],
    service: GenerationService,
) -> None:
    whole = await service.generate(request_message)
    chunks = [chunk async for chunk in service.generate_stream(request_message)]
    for choice in whole.choices:
        mine = [chunk for chunk in chunks if chunk.index == choice.index]
        assert "".join(chunk.text for chunk in mine) == choice.text
        assert [i for chunk in mine for i in chunk.token_ids] == list(choice.token_ids)
        assert [c.finish_reason for c in mine if c.finish_reason] == [choice.finish_reason]
    assert chunks[-1].usage == whole.usage
    assert len(chunks[-1].stats) == len(whole.stats)
    assert [chunk.HasField("usage") for chunk in chunks].count(True) == 1
    assert len({chunk.id for chunk in chunks}) == 1


async def test_tools_and_reasoning(settings: GatewaySettings) -> None:
    hermes = tool_tokenizer(HERMES)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    tokens = hermes.encode(f"so\n</think>\n\nI add.\n{call}", add_special_tokens=False)
    items: list[Item] = [cycle(tokens[i : i + 5]) for i in range(0, len(tokens), 5)]
    served = served_by(hermes, settings, lambda _: [*items, last([])])
    wide = replace(settings, max_context=4000, vocab_size=len(hermes))
    service = service_of(served, ChatTokenizer(hermes), wide)
    parameters = json.dumps(ADD["function"]["parameters"])  # type: ignore[index]
    result = pb.ChatMessage(role="tool", content="2", tool_call_id="c")
    called = pb.ToolCall(id="c", name="add", arguments="{}")
    asked = pb.ChatMessage(role="assistant", tool_calls=[called], reasoning_content="hm")
    request = pb.GenerateRequest(
        model=MODEL,
        conversation=pb.Conversation(messages=[*HI.messages, asked, result]),
        enable_thinking=True,
        tools=[pb.Tool(name="add", description="Adds.", parameters_json=parameters)],
    )
    (choice,) = (await service.generate(request)).choices
    assert (choice.text, choice.reasoning_content) == ("I add.", "so")
    assert (choice.finish_reason, choice.tool_calls[0].arguments) == ("tool_calls", '{"a": 1}')
    prompt = hermes.decode(served.engine.requests[0].prompt_token_ids)
    assert json.dumps(ADD) in prompt and "<think>hm</think><tool_call>" in prompt
    chunks = [chunk async for chunk in service.generate_stream(request)]
    calls = [delta for chunk in chunks for delta in chunk.tool_calls]
    assert [delta.name for delta in calls if delta.id] == ["add"]
    assert "".join(delta.arguments for delta in calls) == '{"a": 1}'
    assert "".join(chunk.reasoning_content for chunk in chunks) == "so"
    request.tools[0].strict = True  # what this service, which has no grammars, must refuse
    with pytest.raises(DFlashError, match=r"tools\[0\]\.function\.strict"):
        await service.generate(request)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"model": "other", "prompt": "a"}, "model_not_found"),
        ({"prompt": "a"}, "invalid_value"),
        ({"model": MODEL}, "invalid_value"),
        ({"model": MODEL, "prompt": ""}, "invalid_value"),
        ({"model": MODEL, "prompt": "a", "temperature": 3.0}, "invalid_value"),
        ({"model": MODEL, "prompt": "a", "max_tokens": 0}, "invalid_value"),
        ({"model": MODEL, "prompt": "a", "max_tokens": 999}, "context_length_exceeded"),
        ({"model": MODEL, "prompt": "a", "more_json": "[1]"}, "invalid_value"),
        ({"model": MODEL, "prompt": "a", "more_json": "{"}, "invalid_value"),
        (
            {"model": MODEL, "prompt": "a", "more_json": '{"best_of": 2}'},
            "unsupported_parameter",
        ),
        (
            {"model": MODEL, "prompt": "a", "more_json": '{"stream": true}'},
            "unsupported_parameter",
        ),
        ({"model": MODEL, "prompt_token_ids": pb.TokenIds(ids=[330])}, "invalid_value"),
        ({"model": MODEL, "prompt_token_ids": pb.TokenIds()}, "invalid_value"),
        ({"model": MODEL, "conversation": pb.Conversation()}, "invalid_value"),
        (
            {"model": MODEL, "conversation": HI, "tools": [pb.Tool(name="f")]},
            "unsupported_parameter",
        ),
        (
            {"model": MODEL, "conversation": HI, "tools": [pb.Tool(name="f", parameters_json="{")]},
            "invalid_value",
        ),
    ],
)
async def test_refusals(
    fields: dict[str, Any], code: str, served: Served, service: GenerationService
) -> None:
    request = pb.GenerateRequest(**fields)
    with pytest.raises(DFlashError) as caught:
        await service.generate(request)
    assert caught.value.code == code
    with pytest.raises(DFlashError):
        async for _ in service.generate_stream(request):
            pass
    assert served.engine.requests == []


async def test_unknown_fields_are_listed(service: GenerationService) -> None:
    request = pb.GenerateRequest(model=MODEL, prompt="a", more_json='{"wild": 1}')
    assert list((await service.generate(request)).ignored_fields) == ["wild"]
    chunks = [chunk async for chunk in service.generate_stream(request)]
    assert [list(chunk.ignored_fields) for chunk in chunks] == [["wild"], *[[]] * (len(chunks) - 1)]


def every_error(cls: type[DFlashError] = DFlashError) -> set[type[DFlashError]]:
    return {cls}.union(*(every_error(child) for child in cls.__subclasses__()))


async def test_every_error_has_a_canonical_code() -> None:
    for cls in every_error():
        code, details = status_of(cls("why"))
        assert code is STATUS_OF[cls.status] and code is not grpc.StatusCode.OK
        assert details == f"[{cls.code}] why"
    assert status_of(errors.OverloadedError("x"))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert status_of(KeyError("secret")) == (
        grpc.StatusCode.INTERNAL,
        "[internal_error] Internal error.",
    )
    assert status_of(InvalidRequestError("x"))[0] is grpc.StatusCode.INVALID_ARGUMENT


async def test_leaving_a_stream_ends_the_request(
    served: Served, service: GenerationService
) -> None:
    stream = service.generate_stream(pb.GenerateRequest(model=MODEL, prompt="a"))
    await anext(stream)
    assert served.engine.num_open == 1
    await stream.aclose()
    assert served.engine.num_open == 0


async def test_models_and_readiness(served: Served, service: GenerationService) -> None:
    (model,) = service.list_models().models
    assert (model.id, model.max_model_len, model.created) == (MODEL, 128, 1700000000)
    await service.check_ready()
    served.engine.not_ready = errors.EngineUnavailableError("no")
    with pytest.raises(errors.EngineUnavailableError):
        await service.check_ready()
