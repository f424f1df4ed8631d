from __future__ import annotations

import pytest
from gateway_fakes import Encode, Serve, last

from gateway.chat_tokenizer import ChatTokenizer

pytestmark = pytest.mark.asyncio

TEXT_PART = {"type": "text", "text": "a"}
IMAGE_PART = {"type": "image_url", "image_url": {"url": "x"}}


def message(content: object = "hi", role: str = "user", **more: object) -> list[dict[str, object]]:
    return [{"role": role, "content": content, **more}]


BAD_CHAT = [
    ({"model": ...}, "model"),
    ({"model": 3}, "model"),
    ({"messages": ...}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": message(role="robot")}, "messages[0].role"),
    ({"messages": message(None)}, "messages[0].content"),
    ({"messages": message({"a": 1})}, "messages[0].content"),
    ({"messages": message([TEXT_PART, IMAGE_PART])}, "messages[0].content"),
    ({"messages": message([{"text": "a"}])}, "messages[0].content"),
    ({"messages": message([{"type": "text"}])}, "messages[0].content"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"n": 5}, "n"),
    ({"return_token_ids": 1}, "return_token_ids"),
    ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"seed": 1.5}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [330]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"stream": "yes"}, "stream"),
    ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"dflash": "off"}, "dflash"),
    ({"dflash": {"speed": 9}}, "dflash.speed"),
    ({"dflash": {"stats": 1}}, "dflash.stats"),
    ({"dflash": {"policy": "fast"}}, "dflash.policy"),
    ({"dflash": {"policy": "static:1"}}, "dflash.policy"),
    ({"dflash": {"policy": "static:17"}}, "dflash.policy"),
    ({"dflash": {"policy": "static:08"}}, "dflash.policy"),
    ({"dflash": {"policy": "static-tree:1"}}, "dflash.policy"),
    ({"dflash": {"policy": "static-tree:65"}}, "dflash.policy"),
    ({"dflash": {"policy": "static-tree:08"}}, "dflash.policy"),
    ({"dflash": {"policy": "tree:8"}}, "dflash.policy"),
    ({"dflash": {"policy": "static:٣"}}, "dflash.policy"),
]
BAD_COMPLETION = [
    ({"prompt": ...}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [[5], "a"]}, "prompt"),
    ({"prompt": [5, "a"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [5, 330]}, "prompt"),
    ({"prompt": [[5], [-1]]}, "prompt"),
    ({"prompt": ["a"] * 5}, "prompt"),
    ({"prompt": ["a", "b", "c"], "n": 2}, "n"),
]


@pytest.mark.parametrize("stream", [None, True])
@pytest.mark.parametrize(("fields", "param"), BAD_CHAT)
async def test_bad_chat_values(
    fields: dict[str, object], param: str, stream: bool | None, serve: Serve
) -> None:
    served = serve([])
    response = await served.chat(**{"stream": stream, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", param)
    assert error["type"] == "invalid_request_error"
    assert param.split(".")[0] in error["message"]
    assert served.engine.requests == []


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETION)
async def test_bad_completion_values(fields: dict[str, object], param: str, serve: Serve) -> None:
    served = serve([])
    response = await served.complete(**fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", param)
    assert served.engine.requests == []


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": None, "temperature": None, "top_p": None, "top_k": None, "seed": None},
        {"stop": None, "stop_token_ids": None, "ignore_eos": None, "stream": None},
        {"stream_options": None, "user": None, "dflash": None},
        {"temperature": 2, "top_p": 1, "top_k": 0, "seed": 10**30},
        {"stop": [], "dflash": {}},
        {"stop": ["a", "b", "c", "d"], "dflash": {"policy": "static:16", "stats": False}},
        {"dflash": {"policy": "static:2"}},
        {"max_tokens": 3, "max_completion_tokens": 3},
        {"top_k": 10**9},
    ],
)
async def test_good_edges(fields: dict[str, object], serve: Serve) -> None:
    served = serve([last([])])
    response = await served.chat(**fields)
    assert response.status_code == 200, response.text
    assert 0 <= served.engine.requests[0].sampling.top_k <= 330


@pytest.mark.parametrize("stream", [False, True])
async def test_context_length(serve: Serve, stream: bool | None) -> None:
    served = serve(lambda _: [last([])])
    fits = await served.complete(prompt=[5] * 100, max_tokens=28, stream=stream)
    assert fits.status_code == 200
    silent = await served.complete(prompt=[5] * 127, stream=stream)
    assert silent.status_code == 200
    assert served.engine.requests[-1].max_tokens == 1
    for fields, param in [
        ({"prompt": [5] * 100, "max_tokens": 29}, "max_tokens"),
        ({"prompt": [5] * 100, "max_completion_tokens": 29}, "max_completion_tokens"),
        ({"prompt": [5] * 128}, "prompt"),
        ({"prompt": [[5], [5] * 128]}, "prompt"),
    ]:
        response = await served.complete(stream=stream, **fields)
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert len(served.engine.requests) == 2


async def test_unknown_model(serve: Serve) -> None:
    response = await serve([]).chat(model="gpt-4")
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["type"], error["param"]) == (
        "model_not_found",
        "not_found_error",
        "model",
    )
    assert "demo/model" in error["message"]


@pytest.mark.parametrize("is_one_long_message", [True, False])
async def test_conversations_that_cannot_fit_cost_nothing(
    serve: Serve, is_one_long_message: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: ChatTokenizer, messages: object) -> str:
        raise AssertionError("rendered although it cannot fit")

    monkeypatch.setattr(ChatTokenizer, "render", refuse)
    message = {"role": "user", "content": ""}
    messages = [message] * 129  # the context is 128 tokens
    if is_one_long_message:
        messages = [{**message, "content": "x" * 3900}]
    response = await serve([]).chat(messages=messages)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize(
    "policy", ["adaptive", "adaptive-chain", "table", "off", "static:16", "static-tree:64"]
)
async def test_every_policy_may_be_requested(serve: Serve, encode: Encode, policy: str) -> None:
    served = serve([last(encode("x"))])
    response = await served.chat(dflash={"policy": policy})
    assert response.status_code == 200
    assert served.engine.requests[0].policy == policy
