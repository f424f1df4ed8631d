from __future__ import annotations

from dataclasses import replace

import pytest
from gateway_fakes import Encode, Serve, last

from dflash_wire.gauges import GroupGauges

pytestmark = pytest.mark.asyncio

CHAT = [{"role": "user", "content": "hi"}]


async def test_tokenize_a_prompt_as_completions_do(serve: Serve, encode: Encode) -> None:
    served = serve(lambda _: [last([])])
    body = {"model": "demo/model", "prompt": "the quick fox", "return_token_strs": True}
    answer = (await served.http.post("/tokenize", json=body)).json()
    assert answer["tokens"] == encode("the quick fox")
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 128)
    assert len(answer["token_strs"]) == answer["count"]
    assert "".join(answer["token_strs"]).replace("Ġ", " ") == "the quick fox"
    await served.complete(prompt="the quick fox")
    assert served.engine.requests[0].prompt_token_ids == answer["tokens"]


async def test_tokenize_a_conversation_as_chat_does(serve: Serve, encode: Encode) -> None:
    served = serve(lambda _: [last([])])
    answer = (await served.http.post("/tokenize", json={"messages": CHAT})).json()
    await served.chat()
    assert answer["tokens"] == served.engine.requests[0].prompt_token_ids
    body = {"messages": CHAT, "add_generation_prompt": False}
    closed = (await served.http.post("/tokenize", json=body)).json()["tokens"]
    assert closed == encode("<|im_start|>user\nhi<|im_end|>\n")


async def test_detokenize_is_the_way_back(serve: Serve, encode: Encode) -> None:
    text = "<|im_start|>user\nthe 😀<|im_end|>"
    response = await serve([]).http.post("/detokenize", json={"tokens": encode(text), "wild": 1})
    assert response.json() == {"prompt": text}
    assert response.headers["x-dflash-ignored-fields"] == "wild"


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, None),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, 400, None),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [330]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [5], "model": "other"}, 404, "model"),
    ],
)
async def test_refusals(
    path: str, body: dict[str, object], status: int, param: str | None, serve: Serve
) -> None:
    response = await serve([]).http.post(path, json=body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param
    if body == {}:
        assert "prompt" in response.text or "tokens" in response.text


async def test_load_counts_running_and_waiting(serve: Serve) -> None:
    served = serve([])
    response = await served.http.get("/load")
    assert response.status_code == 503
    group = GroupGauges("a", 3, 2, 700, 100, 40, 5, 0, 9, 0)
    served.engine.groups = [group, replace(group, group="b", num_running=1, num_waiting=0)]
    answer = (await served.http.get("/load")).json()
    assert answer["server_load"] == 6
    assert answer["engine_groups"][0] == {
        "group": "a",
        "num_running": 3,
        "num_waiting": 2,
        "num_outstanding_tokens": 700,
    }
    assert [group["group"] for group in answer["engine_groups"]] == ["a", "b"]
