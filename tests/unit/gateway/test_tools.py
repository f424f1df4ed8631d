"""Tools and reasoning through the whole gateway: prompts, answers, streams, and what is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from gateway_fakes import Item, Served, cycle, last, sse_data
from tool_models import ADD, HERMES, LLAMA3, served_by, tool_tokenizer
from transformers import PreTrainedTokenizerFast

from gateway.state import GatewaySettings

pytestmark = pytest.mark.asyncio

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>'
ANSWER = f"<think>\nthe fox\n</think>\n\nI add.\n{CALL}\n{CALL}"
Build = Callable[..., Served]


@pytest.fixture(scope="module")
def hermes() -> PreTrainedTokenizerFast:
    return tool_tokenizer(HERMES)


@pytest.fixture
def build(hermes: PreTrainedTokenizerFast, settings: GatewaySettings) -> Build:
    def make(script: Any) -> Served:
        return served_by(hermes, settings, script)

    return make


def ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def in_chunks(tokens: list[int], seed: int, reason: str = "stop") -> list[Item]:
    """Cut tokens into blocks at random; the last ends the sequence."""
    chance = random.Random(seed)
    items: list[Item] = []
    while tokens:
        size = chance.choice([1, 1, 2, 4, 16, len(tokens)])
        items.append(cycle(tokens[:size]))
        tokens = tokens[size:]
    return [*items, last([], reason)]


def add_up(chunks: list[Any]) -> dict[str, Any]:
    """Return the message that the deltas of choice 0 make, and its finish reason."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(message["calls"])
                message["calls"].append([call["function"]["name"], ""])
            message["calls"][call["index"]][1] += call["function"]["arguments"]
        message["finish_reason"] = choice["finish_reason"]
    return message


async def test_a_whole_answer_is_taken_apart(build: Build, hermes: PreTrainedTokenizerFast) -> None:
    served = build(lambda _: in_chunks(ids(hermes, ANSWER), 1))
    answer = await served.openai.chat.completions.create(
        model="demo/model",
        messages=[{"role": "user", "content": "hi"}],
        tools=[ADD],  # type: ignore[list-item]
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I add."
    assert choice.message.reasoning_content == "the fox"  # type: ignore[attr-defined]
    calls = choice.message.tool_calls or []
    assert [json.loads(call.function.arguments) for call in calls] == [{"a": 1, "b": "ü"}] * 2
    assert len({call.id for call in calls}) == 2
    details = answer.usage.completion_tokens_details
    assert 3 <= details.reasoning_tokens <= len(ids(hermes, "<think>\nthe fox\n</think>"))
    assert answer.usage.completion_tokens == len(ids(hermes, ANSWER))


@pytest.mark.parametrize("seed", range(12))
async def test_a_stream_adds_up_to_the_whole_however_it_is_cut(
    seed: int, build: Build, hermes: PreTrainedTokenizerFast
) -> None:
    served = build(lambda _: in_chunks(ids(hermes, ANSWER), seed))
    *chunks, usage, done = sse_data(
        (await served.chat(tools=[ADD], stream=True, stream_options={"include_usage": True})).text
    )
    assert done == "[DONE]"
    assert add_up(chunks) == {
        "content": "I add.",
        "reasoning_content": "the fox",
        "calls": [["add", '{"a": 1, "b": "ü"}']] * 2,
        "finish_reason": "tool_calls",
    }
    whole = (await served.chat(tools=[ADD])).json()
    assert usage["usage"] == whole["usage"]


async def test_the_openai_client_collects_a_streamed_call(
    build: Build, hermes: PreTrainedTokenizerFast
) -> None:
    served = build(lambda _: in_chunks(ids(hermes, CALL), 3))
    async with served.openai.chat.completions.stream(
        model="demo/model",
        messages=[{"role": "user", "content": "hi"}],
        tools=[ADD],  # type: ignore[list-item]
    ) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    (call,) = final.choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments) == {"a": 1, "b": "ü"}


async def test_one_call_at_a_time_ends_with_the_first(
    build: Build, hermes: PreTrainedTokenizerFast
) -> None:
    expected = ids(hermes, CALL[: CALL.rindex("}") + 1])
    for seed in range(6):
        served = build(lambda _, seed=seed: in_chunks(ids(hermes, CALL + "\n" + CALL), seed))
        body = (
            await served.chat(tools=[ADD], parallel_tool_calls=False, return_token_ids=True)
        ).json()
        (choice,) = body["choices"]
        assert len(choice["message"]["tool_calls"]) == 1
        assert choice["finish_reason"] == "tool_calls"
        assert choice["token_ids"] == expected
        assert body["usage"]["completion_tokens"] == len(expected)
        assert served.engine.num_open == 0


async def test_length_inside_a_call_is_length(
    build: Build, hermes: PreTrainedTokenizerFast
) -> None:
    tokens = ids(hermes, CALL)[:-30]
    served = build(lambda _: in_chunks(tokens, 0, "length"))
    (choice,) = (await served.chat(tools=[ADD])).json()["choices"]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    "text", ["<think>\nthe fox", "<think>", "<think>\nthe fox\n</think>", ANSWER]
)
@pytest.mark.parametrize("stop", [None, "fox", "</think>"])
async def test_no_more_tokens_are_reasoning_than_there_are(
    text: str, stop: str | None, build: Build, hermes: PreTrainedTokenizerFast
) -> None:
    """Whatever ends the output: a length inside of the reasoning, a stop string in it, or its own end."""
    for seed in range(4):
        served = build(lambda _, seed=seed: in_chunks(ids(hermes, text), seed, "length"))
        fields = {"stop": stop, "n": 2, "tools": [ADD]}
        whole = (await served.chat(**fields)).json()
        options = {"include_usage": True}
        *_, usage, _ = sse_data(
            (await served.chat(**fields, stream=True, stream_options=options)).text
        )
        assert usage["usage"] == whole["usage"]
        num_tokens = whole["usage"]["completion_tokens"]
        num_reasoning = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert 0 < num_reasoning <= num_tokens <= 2 * len(ids(hermes, text))
        assert num_reasoning < num_tokens or "I add." not in text or stop is not None


async def test_the_prompt_has_tools_calls_and_results(
    build: Build, hermes: PreTrainedTokenizerFast
) -> None:
    served = build(lambda _: [last([])])
    messages = [
        {"role": "user", "content": "add"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "add", "arguments": '{"a":1}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ]
    body = {"messages": messages, "tools": [ADD]}
    response = await served.chat(**body)
    assert response.status_code == 200, response.text
    prompt = hermes.decode(served.engine.requests[0].prompt_token_ids)
    assert prompt == (
        f"<|im_start|>system\n{json.dumps(ADD)}\nCall: <tool_call>{{}}</tool_call><|im_end|>\n"
        "<|im_start|>user\nadd<|im_end|>\n<|im_start|>assistant\n<think>hm</think>"
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"
    )
    tokens = (await served.http.post("/tokenize", json=body)).json()["tokens"]
    assert tokens == served.engine.requests[0].prompt_token_ids


async def test_no_tools_are_offered_where_none_may_be_called(
    build: Build, hermes: PreTrainedTokenizerFast
) -> None:
    served = build(lambda _: in_chunks(ids(hermes, CALL), 2))
    body = (await served.chat(tools=[ADD], tool_choice="none")).json()
    assert body["choices"][0]["message"]["content"] == CALL
    assert "Call:" not in hermes.decode(served.engine.requests[0].prompt_token_ids)


async def test_a_prompt_that_begins_the_reasoning(
    build: Build, hermes: PreTrainedTokenizerFast
) -> None:
    served = build(lambda _: in_chunks(ids(hermes, "the fox\n</think>\n\ndog"), 2))
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    message = (await served.chat(**thinking)).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("the fox", "dog")
    *chunks, _ = sse_data((await served.chat(stream=True, **thinking)).text)
    found = add_up(chunks)
    assert (found["reasoning_content"], found["content"]) == ("the fox", "dog")
    # A text completion is text.
    text = (await served.complete()).json()["choices"][0]["text"]
    assert text == "the fox\n</think>\n\ndog"


async def test_llama_calls_and_special_markers(settings: GatewaySettings) -> None:
    tokenizer = tool_tokenizer(LLAMA3, "<|python_tag|>")
    answer = '<|python_tag|>{"name": "add", "parameters": {"a": 1}}'
    served = served_by(tokenizer, settings, lambda _: in_chunks(ids(tokenizer, answer), 4))
    (choice,) = (await served.chat(tools=[ADD])).json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert choice["message"]["content"] is None
    # Without tools it is text, and special tokens have none.
    (choice,) = (await served.chat()).json()["choices"]
    assert choice["message"]["content"] == answer.removeprefix("<|python_tag|>")


async def test_special_think_tokens_are_seen(settings: GatewaySettings) -> None:
    tokenizer = tool_tokenizer(HERMES, "<think>", "</think>")
    script = in_chunks(ids(tokenizer, "<think>so</think>yes"), 4)
    served = served_by(tokenizer, settings, lambda _: script)
    message = (await served.chat()).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("so", "yes")
    assert (await served.complete()).json()["choices"][0]["text"] == "soyes"


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "invalid_value",
            "tool_choice",
        ),
        ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
        ({"tools": [ADD], "tool_choice": "maybe"}, "invalid_value", "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function"}}, "invalid_value", "tool_choice"),
        ({"tools": [{"type": "function"}]}, "invalid_value", "tools[0].function"),
        ({"tools": [{"type": "code_interpreter"}]}, "invalid_value", "tools[0].type"),
        (
            {"tools": [{"type": "function", "function": {"name": ""}}]},
            "invalid_value",
            "tools[0].function.name",
        ),
    ],
)
async def test_refusals(fields: dict[str, Any], code: str, param: str, build: Build) -> None:
    served = build([])
    response = await served.chat(**fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert served.engine.requests == []


@pytest.mark.parametrize("arguments", ["{", "[1]", "5", "[" * 100_000, r'{"a": "\ud800"}'])
async def test_arguments_in_the_conversation_are_objects(arguments: str, build: Build) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    served = build([])
    response = await served.chat(messages=messages)
    assert response.status_code in (400, 413), response.text
    if response.status_code == 400:
        assert response.json()["error"]["param"] == "messages[0].tool_calls[0].function.arguments"


async def test_a_model_without_tools_says_so(serve: Any) -> None:
    response = await serve([]).chat(tools=[ADD])
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", "tools")
    assert "template" in error["message"]


async def test_unknown_fields_of_tools_are_listed(build: Build) -> None:
    odd = {"type": "function", "y": 2, "function": {**ADD["function"], "strict": False, "x": 1}}  # type: ignore[dict-item]
    response = await build([last([])]).chat(tools=[odd])
    assert response.headers["x-dflash-ignored-fields"] == "tools[0].y, tools[0].function.x"


async def test_tools_that_cannot_fit_are_refused_early(build: Build) -> None:
    huge = {"name": "add", "parameters": {"description": "x " * 18_000}}
    response = await build([]).chat(tools=[{"type": "function", "function": huge}])
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_events_filled_into_templates_are_those_written_out(
    build: Build, hermes: PreTrainedTokenizerFast
) -> None:
    served = build(lambda _: in_chunks(ids(hermes, ANSWER), 5))
    filled = sse_data((await served.chat(tools=[ADD], stream=True, n=2)).text)
    # With token ids every event is written out.
    full = sse_data((await served.chat(tools=[ADD], stream=True, n=2, return_token_ids=True)).text)

    def deltas(events: list[Any]) -> list[list[Any]]:
        choices = [event["choices"][0] for event in events[:-1]]
        for choice in choices:
            choice.pop("token_ids", None)
            for call in choice["delta"].get("tool_calls", []):
                call.pop("id", None)
        # Chunks whose tokens say nothing yet are there for their ids alone.
        empty = {"content": ""}
        return [
            [c for c in choices if c["index"] == index and c["delta"] != empty] for index in (0, 1)
        ]

    assert deltas(filled) == deltas(full)
