"""Answers of a form, through everything: the official client, the worker, the ring, and every policy."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any, Literal

import httpx
import openai
import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field
from served_app import ServedApp, groups

pytestmark = [
    pytest.mark.serve,
    pytest.mark.slow,
    pytest.mark.asyncio,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
]

QUESTION = [{"role": "user", "content": "Sara has 12 pens. She buys 3 boxes of 8 pens. How many?"}]
POLICIES = ("off", "static:4", "static:16", "static-tree:16", "adaptive")


class Step(BaseModel):
    operation: Literal["add", "subtract", "multiply"]
    number: int = Field(ge=0, le=999)


class Solution(BaseModel):
    what: Literal["pens", "apples", "boxes"]
    steps: list[Step] = Field(min_length=1, max_length=3)
    answer: int = Field(ge=0, le=99_999)
    is_certain: bool


ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 999},
                "b": {"type": "integer", "minimum": 0, "maximum": 999},
            },
            "required": ["a", "b"],
        },
    },
}
ROUND: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "round",
        "parameters": {
            "type": "object",
            "properties": {"up": {"type": "boolean"}},
            "required": ["up"],
        },
    },
}


@pytest_asyncio.fixture
async def client(served: ServedApp) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{served.base_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


def options(served: ServedApp, policy: str, **more: Any) -> dict[str, Any]:
    dflash = {"policy": policy, "stats": True, **more.pop("dflash", {})}
    fixed = {"model": served.args.model.id, "max_tokens": 200, "temperature": 0}
    return {**fixed, **more, "extra_body": {"dflash": dflash, **more.get("extra_body", {})}}


@pytest.mark.parametrize("temperature", [0, 0.9])
async def test_a_parsed_answer_is_the_same_under_every_policy(
    served: ServedApp, client: openai.AsyncOpenAI, temperature: float
) -> None:
    texts = set()
    for policy in POLICIES:
        asked = options(served, policy, temperature=temperature, seed=5)
        answer = await client.chat.completions.parse(
            messages=QUESTION,  # type: ignore[arg-type]
            response_format=Solution,
            **asked,
        )
        (choice,) = answer.choices
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Solution)
        texts.add(choice.message.content)
    assert len(texts) == 1


async def test_a_stream_is_the_whole_and_log_probabilities_fit(
    served: ServedApp, client: openai.AsyncOpenAI
) -> None:
    form = {
        "type": "json_schema",
        "json_schema": {"name": "s", "schema": Solution.model_json_schema()},
    }
    asked = options(served, "static:8", response_format=form, logprobs=True, top_logprobs=2, n=2)
    whole = await client.chat.completions.create(messages=QUESTION, **asked)
    texts, tokens = ["", ""], [0, 0]
    stream = await client.chat.completions.create(messages=QUESTION, stream=True, **asked)
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += len(choice.logprobs.content or ()) if choice.logprobs else 0
    assert texts == [choice.message.content for choice in whole.choices]
    for choice in whole.choices:
        Draft202012Validator(Solution.model_json_schema()).validate(json.loads(texts[choice.index]))
        assert choice.logprobs is not None
        assert tokens[choice.index] == len(choice.logprobs.content or ())


@pytest.mark.parametrize("policy", ["off", "static:8", "static-tree:8"])
async def test_calls_are_forced(served: ServedApp, client: openai.AsyncOpenAI, policy: str) -> None:
    named = {"type": "function", "function": {"name": "round"}}
    asked = options(served, policy, tools=[ADD, ROUND], tool_choice=named)
    answer = await client.chat.completions.create(messages=QUESTION, **asked)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert call.function.name == "round"
    assert isinstance(json.loads(call.function.arguments)["up"], bool)

    asked = options(
        served,
        policy,
        tools=[ADD, ROUND],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=1.0,
        seed=2,
    )
    async with client.chat.completions.stream(messages=QUESTION, **asked) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or []
    assert final.choices[0].message.content in (None, "")
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (ADD, ROUND)}
    arguments = json.loads(call.function.arguments)
    Draft202012Validator(schemas[call.function.name]).validate(arguments)


class Parcel(BaseModel):
    """Sends a parcel."""

    size: Literal["small", "large"]
    stops: list[Literal["home", "work"]] = Field(min_length=1, max_length=2)
    is_fragile: bool


async def test_a_call_that_nobody_demanded_follows_a_strict_schema(
    served: ServedApp, client: openai.AsyncOpenAI
) -> None:
    """This model knows no tools: each token of the tag, in turn, is made the likeliest until it has come."""
    async with httpx.AsyncClient(base_url=served.base_url) as http:
        tag = (await http.post("/tokenize", json={"prompt": "<tool_call>"})).json()["tokens"]
    bias = {str(token_id): 100 - 14 * i for i, token_id in enumerate(tag)}
    kinds = {kind.__name__: kind for kind in (Parcel, Step)}
    texts = set()
    for policy in POLICIES:
        asked = options(
            served,
            policy,
            tools=[openai.pydantic_function_tool(kind) for kind in kinds.values()],
            logit_bias=bias,
            parallel_tool_calls=False,
            extra_body={"repetition_penalty": 10.0},
        )
        answer = await client.chat.completions.parse(messages=QUESTION, **asked)
        async with client.chat.completions.stream(messages=QUESTION, **asked) as stream:
            streamed = await stream.get_final_completion()
        for completion in (answer, streamed):
            (choice,) = completion.choices
            assert choice.finish_reason == "tool_calls"
            (call,) = choice.message.tool_calls or []
            assert isinstance(call.function.parsed_arguments, kinds[call.function.name])
            texts.add(call.function.arguments)
    assert len(texts) == 1


async def test_the_responses_api_follows_a_schema(
    served: ServedApp, client: openai.AsyncOpenAI
) -> None:
    answer = await client.responses.parse(
        model=served.args.model.id,
        input=QUESTION,  # type: ignore[arg-type]
        max_output_tokens=200,
        temperature=0,
        text_format=Solution,
    )
    assert isinstance(answer.output_parsed, Solution)


async def test_many_grammars_at_once(served: ServedApp, client: openai.AsyncOpenAI) -> None:
    """Each with its own pattern, policy and mode, with too few rows for all."""

    async def one(index: int) -> str:
        extra = {
            "structured_outputs": {"regex": f"[ab]{{{index % 5 + 1}}}-{index}( [a-z]{{3}}){{2}}"},
            "dflash": {
                "policy": POLICIES[index % len(POLICIES)],
                "sampling": "rejection" if index % 3 == 0 else "coupled",
            },
        }
        answer = await client.completions.create(
            model=served.args.model.id,
            prompt=f"Number {index}: ",
            max_tokens=60,
            temperature=1.0 if index % 2 else 0.0,
            seed=index,
            presence_penalty=0.5,
            extra_body=extra,
        )
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].text

    texts = await asyncio.gather(*(one(index) for index in range(40)))
    for index, text in enumerate(texts):
        assert re.fullmatch(rf"[ab]{{{index % 5 + 1}}}-{index}( [a-z]{{3}}){{2}}", text)


async def test_a_hostile_grammar_costs_its_own_request_alone(
    served: ServedApp, client: openai.AsyncOpenAI
) -> None:
    model = served.args.model.id

    async def hostile() -> openai.APIStatusError:
        with pytest.raises(openai.APIStatusError) as refusal:
            await client.completions.create(
                model=model,
                prompt="a",
                extra_body={"guided_regex": "((b{1,100}){1,100}){1,100}"},
            )
        return refusal.value

    refusal = asyncio.create_task(hostile())
    answers = [
        await client.completions.create(model=model, prompt="Sara has", max_tokens=8)
        for _ in range(5)
    ]
    assert all(answer.choices[0].text for answer in answers)
    error = await refusal
    assert (error.status_code, error.param) == (400, "guided_regex")


async def test_metrics_count_what_was_forced(served: ServedApp, client: openai.AsyncOpenAI) -> None:
    asked = options(served, "static:8", max_tokens=60)
    text = "The answer is exactly twenty-four pens and nothing else."
    asked["extra_body"]["guided_choice"] = [text]
    answer = await client.chat.completions.create(messages=QUESTION, **asked)
    assert answer.choices[0].message.content == text
    (group,) = await groups(served)
    counts = group["guided"]
    assert counts["num_guided_tokens"] > counts["num_forced_tokens"] > 0, "at least the end is"
    assert counts["num_written_drafts"] > 0
    async with httpx.AsyncClient(base_url=served.base_url) as http:
        text = (await http.get("/metrics")).text
    assert re.search(r'dflash_forced_tokens_total\{group="[^"]+"\} [1-9]', text)
