"""``/v1/responses`` with the official client: text, reasoning, calls, events, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from gateway_fakes import Encode, Item, Serve, Served, cycle, last
from tool_models import ADD, HERMES, served_by, tool_tokenizer
from transformers import PreTrainedTokenizerFast

from dflash_wire.errors import EngineUnavailableError, OverloadedError
from gateway.state import GatewaySettings

pytestmark = pytest.mark.asyncio

TOOL = {"type": "function", **ADD["function"]}  # type: ignore[dict-item]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ANSWER = f"<think>\nthe fox\n</think>\n\nI add.\n{CALL}"
BODY: dict[str, Any] = {"model": "demo/model", "input": "hi"}


async def post(served: Served, **fields: object) -> Any:
    return await served.http.post("/v1/responses", json={**BODY, **fields})


def events_of(text: str) -> list[tuple[str, Any]]:
    found = []
    for block in text.split("\n\n"):
        if block:
            name, data = block.split("\n", 1)
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


@pytest.fixture(scope="module")
def hermes() -> PreTrainedTokenizerFast:
    return tool_tokenizer(HERMES)


@pytest.fixture
def tools(hermes: PreTrainedTokenizerFast, settings: GatewaySettings) -> Served:
    tokens = hermes.encode(ANSWER, add_special_tokens=False)
    items: list[Item] = [cycle(tokens[i : i + 7]) for i in range(0, len(tokens), 7)]
    return served_by(hermes, settings, lambda _: [*items, last([])])


async def test_text(serve: Serve, encode: Encode) -> None:
    served = serve(lambda _: [encode("the quick"), last(encode(" fox"))])
    answer = await served.openai.responses.create(
        model="demo/model", input="hi", instructions="Be", temperature=0, max_output_tokens=9
    )
    assert answer.output_text == "the quick fox"
    assert (answer.status, answer.object, answer.store) == ("completed", "response", False)
    (item,) = answer.output
    assert (item.type, item.status, item.role) == ("message", "completed", "assistant")
    assert answer.usage.output_tokens == len(encode("the quick")) + len(encode(" fox"))
    assert (answer.instructions, answer.temperature) == ("Be", 0)
    request = served.engine.requests[0]
    assert request.max_tokens == 9
    assert request.prompt_token_ids == encode(
        "<|im_start|>system\nBe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_stream_adds_up_to_the_whole(tools: Served) -> None:
    whole = (await post(tools, tools=[TOOL])).json()
    response = await post(tools, tools=[TOOL], stream=True)
    events = events_of(response.text)
    assert all(name == data["type"] for name, data in events)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert [name for name, _ in events][:2] == ["response.created", "response.in_progress"]
    assert events[-1][0] == "response.completed"
    final = events[-1][1]["response"]
    done = [data["item"] for name, data in events if name == "response.output_item.done"]
    assert final["output"] == done
    assert without_ids(final["output"]) == without_ids(whole["output"])
    assert final["usage"] == whole["usage"]
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call"]
    for index, kind in enumerate(("reasoning_text", "output_text", "function_call_arguments")):
        deltas = [data for name, data in events if name == f"response.{kind}.delta"]
        assert {data["output_index"] for data in deltas} == {index}
        assert {data["item_id"] for data in deltas} == {done[index]["id"]}
        text = "".join(data["delta"] for data in deltas)
        (end,) = [data for name, data in events if name == f"response.{kind}.done"]
        assert text == end.get("text", end.get("arguments")) != ""
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


async def test_the_client_reads_the_stream(tools: Served) -> None:
    async with tools.openai.responses.stream(
        model="demo/model",
        input="hi",
        tools=[TOOL],  # type: ignore[list-item]
    ) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    reasoning, message, call = final.output
    assert reasoning.content[0].text == "the fox"
    assert message.content[0].text == "I add."
    assert json.loads(call.arguments) == {"a": 1}
    assert final.output_text == "I add."


async def test_a_conversation_with_calls_goes_on(
    tools: Served, hermes: PreTrainedTokenizerFast
) -> None:
    first = (await post(tools, tools=[TOOL])).json()
    output = {
        "type": "function_call_output",
        "call_id": first["output"][2]["call_id"],
        "output": "2",
    }
    items = [{"role": "user", "content": "hi"}, *first["output"], output]
    response = await post(tools, input=items, tools=[TOOL])
    assert response.status_code == 200, response.text
    prompt = hermes.decode(tools.engine.requests[-1].prompt_token_ids)
    assert prompt.endswith(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>the fox</think>I add."
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_length_is_incomplete(serve: Serve, encode: Encode) -> None:
    served = serve(lambda _: [last(encode("the"), "length")])
    body = (await post(served)).json()
    assert (body["status"], body["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert body["output"][0]["status"] == "incomplete"
    name, data = events_of((await post(served, stream=True)).text)[-1]
    assert name == "response.incomplete"
    assert data["response"]["output"][0]["content"][0]["text"] == "the"


async def test_our_extensions_work_here_too(serve: Serve, encode: Encode) -> None:
    served = serve(lambda _: [last(encode("the"))])
    options = {"dflash": {"stats": True, "policy": "off"}, "seed": 5, "priority": 2, "top_k": 3}
    response = await post(served, **options, wild=1)
    assert response.json()["dflash"]["seed"] == 5
    assert response.headers["x-dflash-ignored-fields"] == "wild"
    request = served.engine.requests[0]
    assert (request.policy, request.priority, request.sampling.top_k) == ("off", 2, 3)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"input": 5}, "invalid_value", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": [{"role": "robot", "content": "a"}]}, "invalid_value", "input"),
        ({"input": [{"role": "user"}]}, "invalid_value", "input[0].content"),
        ({"input": [{"content": "a"}]}, "invalid_value", "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "text": ""}]}]},
            "unsupported_parameter",
            "input[0].content",
        ),
        ({"input": [{"type": "item_reference"}]}, "unsupported_parameter", "input[0]"),
        ({"input": [{"type": "function_call"}]}, "invalid_value", "input[0].name"),
        ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
        ({"temperature": 3}, "invalid_value", "temperature"),
        ({"input": "word " * 500}, "context_length_exceeded", "input"),
        ({"max_output_tokens": 128}, "context_length_exceeded", "max_output_tokens"),
        ({"previous_response_id": "resp_1"}, "unsupported_parameter", "previous_response_id"),
        ({"store": True}, "unsupported_parameter", "store"),
        ({"background": True}, "unsupported_parameter", "background"),
        ({"text": {"format": {"type": "json_object"}}}, "unsupported_parameter", "text.format"),
        ({"reasoning": {"effort": "high"}}, "unsupported_parameter", "reasoning"),
        ({"n": 2}, "unsupported_parameter", "n"),
        ({"best_of": 2}, "unsupported_parameter", "best_of"),
        ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools[0].type"),
        ({"tools": [TOOL]}, "unsupported_parameter", "tools"),
        ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
    ],
)
async def test_refusals(fields: dict[str, Any], code: str, param: str, serve: Serve) -> None:
    served = serve([])
    response = await post(served, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (code, param), error
    assert served.engine.requests == []


@pytest.mark.parametrize("stream", [False, True])
async def test_refused_before_the_first_byte(serve: Serve, stream: bool) -> None:
    response = await post(serve([OverloadedError("full")]), stream=stream)
    assert response.status_code == 429


async def test_an_error_inside_a_stream_is_an_event(serve: Serve, encode: Encode) -> None:
    served = serve(lambda _: [encode("the"), EngineUnavailableError("gone")])
    name, data = events_of((await post(served, stream=True)).text)[-1]
    assert (name, data["type"], data["message"]) == ("error", "error", "gone")
    assert data["code"] == "engine_unavailable"
    stream = await served.openai.responses.create(model="demo/model", input="hi", stream=True)
    with pytest.raises(openai.APIError, match="gone"):
        async for _ in stream:
            pass
