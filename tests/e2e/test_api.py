"""The rest of the API against the started application, with real clients."""

from __future__ import annotations

from typing import Any

import httpx
import msgpack
import openai
import pytest
from started_server import StartedServer

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("default")]

QUESTION = [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many apples now?"}]
FIELDS: dict[str, Any] = {"messages": QUESTION, "max_tokens": 40, "temperature": 0.8, "seed": 5}


def test_choices_are_the_same_under_every_policy(client: openai.OpenAI, model: str) -> None:
    texts = set()
    for policy in ("off", "static:8", "adaptive"):
        extra = {"dflash": {"policy": policy, "stats": True}}
        several = client.chat.completions.create(model=model, n=3, extra_body=extra, **FIELDS)
        texts.add(tuple(choice.message.content for choice in several.choices))
    (answers,) = texts
    assert len(answers) == 3
    alone = [
        client.chat.completions.create(model=model, **{**FIELDS, "seed": stats["seed"]})
        for stats in several.dflash
    ]
    assert [one.choices[0].message.content for one in alone] == list(answers)


def test_token_ids_of_a_stream_detokenize_to_its_text(
    server: StartedServer, client: openai.OpenAI, model: str
) -> None:
    stream = client.completions.create(
        model=model,
        prompt="Tom has 3 apples",
        max_tokens=30,
        temperature=0,
        stream=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    choices = [chunk.choices[0] for chunk in stream]
    text = "".join(choice.text for choice in choices)
    tokens = [token for choice in choices for token in getattr(choice, "token_ids", None) or []]
    assert len(tokens) == 30
    answer = httpx.post(f"{server.base_url}/detokenize", json={"tokens": tokens}).json()
    plain = answer["prompt"].replace("<|im_end|>", "").replace("<|im_start|>", "")
    assert plain.replace("<|endoftext|>", "") == text
    prompt = httpx.post(f"{server.base_url}/tokenize", json={"prompt": "Tom has 3 apples"}).json()
    assert choices[0].prompt_token_ids == prompt["tokens"]


def test_msgpack_says_what_json_says(server: StartedServer, model: str) -> None:
    body = {"model": model, "stream": True, **FIELDS, "temperature": 0}
    url = f"{server.base_url}/v1/chat/completions"
    names = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}
    response = httpx.post(url, content=msgpack.packb(body), headers=names, timeout=60)
    assert response.headers["content-type"] == "application/msgpack"
    data, values = response.content, []
    while data:
        end = 4 + int.from_bytes(data[:4], "big")
        values.append(msgpack.unpackb(data[4:end]))
        data = data[end:]
    assert values[0]["model"] == model and values[-1] is None
    text = "".join(v["choices"][0]["delta"].get("content") or "" for v in values[1:-1])
    whole = httpx.post(url, json={**body, "stream": False}, timeout=60).json()
    assert text == whole["choices"][0]["message"]["content"]


def test_responses_answer_and_stream(client: openai.OpenAI, model: str) -> None:
    options: dict[str, Any] = {"model": model, "temperature": 0, "max_output_tokens": 200}
    plain = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=200
    )
    assert plain.choices[0].finish_reason == "stop"
    answer = client.responses.create(input=QUESTION[0]["content"], **options)
    assert answer.output_text == plain.choices[0].message.content
    with client.responses.stream(input=QUESTION, **options) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == answer.output_text
    assert len(deltas) > 1
    assert final.usage.output_tokens == plain.usage.completion_tokens
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(input="hi", previous_response_id="resp_1", **options)


def test_tools_need_a_model_that_knows_them(client: openai.OpenAI, model: str) -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    with pytest.raises(openai.BadRequestError, match="template") as caught:
        client.chat.completions.create(model=model, tools=[tool], **FIELDS)
    assert caught.value.code == "unsupported_parameter"


def test_load(server: StartedServer) -> None:
    load = httpx.get(f"{server.base_url}/load").json()
    assert load["server_load"] == 0 and len(load["engine_groups"]) == 1
