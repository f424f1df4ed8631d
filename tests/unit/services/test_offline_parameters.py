"""Rows of an offline batch may say what requests to the HTTP API may say, and are refused likewise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI
from local_engines import ROOT

from dflash_wire.errors import ClientError
from dflash_wire.ports import EnginePort
from gateway.app import create_app
from gateway.chat_tokenizer import ChatTokenizer
from services.grammar_checker import GrammarChecker
from services.local import LocalEngine
from services.offline_answers import OwnLoopEngine, RowAnswerer, one_at_a_time
from services.settings import gateway_settings
from services.spec import make_spec
from services.yaml_args import read_app_args

pytestmark = [pytest.mark.unit, pytest.mark.asyncio]

MESSAGES = [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many now?"}]
DEFAULTS: dict[str, Any] = {"temperature": 0, "top_p": 1.0, "top_k": 0, "seed": 0}
MAX_TOKENS = 24
ANSWER = {"type": "object", "properties": {"n": {"enum": [3, 4]}}, "required": ["n"]}
FORM = {"name": "answer", "schema": ANSWER}


class Both:
    """The same engine behind HTTP and behind rows."""

    def __init__(self, app: FastAPI, answerer: RowAnswerer) -> None:
        self._app = app
        self._answerer = answerer

    async def over_http(self, fields: dict[str, Any]) -> dict[str, Any]:
        body = {"model": "dflash-demo", "max_tokens": MAX_TOKENS, **DEFAULTS, **fields}
        path = "/v1/completions" if "prompt" in fields else "/v1/chat/completions"
        transport = httpx.ASGITransport(app=self._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answer: dict[str, Any] = (await client.post(path, json=body)).json()
        return answer

    async def row(self, fields: dict[str, Any]) -> dict[str, Any]:
        return await self._answerer.answer("r", {"id": "r", "note": {"any": "\ud800"}, **fields})


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    args = read_app_args(ROOT / "config.yaml")
    engine_args = args.engine.model_copy(update={"policy": "static:8"})
    args = args.model_copy(update={"engine": engine_args})
    spec = make_spec(args)
    settings, tokenizer = gateway_settings(args, spec), ChatTokenizer.load(spec.target_path)
    engine = LocalEngine(args)
    checker = GrammarChecker(spec.target_path, settings.vocab_size)
    check = one_at_a_time(checker.check)
    port = cast("EnginePort", OwnLoopEngine(engine))
    app = create_app(port, tokenizer, settings, grammar_check=check)
    try:
        yield Both(app, RowAnswerer(engine, tokenizer, settings, DEFAULTS, MAX_TOKENS, check))
    finally:
        checker.close()
        engine.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": MESSAGES},
        {"messages": MESSAGES, "temperature": 0.8, "seed": 3, "top_k": 50, "min_p": 0.01},
        {"messages": MESSAGES, "frequency_penalty": 0.9, "presence_penalty": 0.2},
        {"messages": MESSAGES, "repetition_penalty": 1.3, "min_tokens": 24},
        {"messages": MESSAGES, "logit_bias": {"300": -100, "301": 4}, "bad_words": ["apples"]},
        {"messages": MESSAGES, "stop": ["apples"], "include_stop_str_in_output": True},
        {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
        {"messages": MESSAGES, "n": 3, "temperature": 1, "logprobs": True},
        {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": FORM}},
        {"prompt": "Tom has", "structured_outputs": {"regex": "(three|four) (pens|boxes)"}},
        {"prompt": "Tom has", "echo": True, "logprobs": 1},
        {"prompt": "Tom has", "prompt_logprobs": 2, "ignore_eos": True},
        {"prompt": ["Tom has", "Sara has"], "max_tokens": 5},
        {"prompt": [100, 101, 102], "allowed_token_ids": [100, 101, 102], "stop_token_ids": [101]},
        {
            "prompt": "Tom has",
            "dflash": {"policy": "static:4", "stats": True, "drafter": "default"},
        },
    ],
)
async def test_a_row_has_the_answer_of_http(both: Both, fields: dict[str, Any]) -> None:
    plain, row = await both.over_http(fields), await both.row(fields)
    first = plain["choices"][0]
    assert row["text"] == (first["text"] if "prompt" in fields else first["message"]["content"])
    assert row["finish_reason"] == first["finish_reason"]
    usage = plain["usage"]
    assert row["prompt_tokens"] == usage["prompt_tokens"]
    assert row["completion_tokens"] == usage["completion_tokens"]
    for name in ("token_ids", "prompt_token_ids"):
        assert row.get(name) == first.get(name, plain.get(name))
    assert_close(row.get("logprobs"), first["logprobs"])
    expected = first.get("prompt_logprobs", plain.get("prompt_logprobs"))
    assert_close(row.get("prompt_logprobs"), expected)
    assert ("choices" in row) == (len(plain["choices"]) > 1)
    for mine, theirs in zip(row.get("choices", []), plain["choices"], strict=False):
        assert mine.get("text") == theirs.get("text") and mine.get("message") == theirs.get(
            "message"
        )
    assert ("dflash" in row) == ("dflash" in fields)
    assert row["acceptance_length"] >= 1 or row["completion_tokens"] == 1


def assert_close(mine: Any, theirs: Any) -> None:
    """The same but for the last digits: rows of another width may have stood in the batch."""
    if isinstance(theirs, float):
        assert mine == pytest.approx(theirs, abs=1e-4)
    elif isinstance(theirs, dict):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert_close(mine[name], value)
    elif isinstance(theirs, list):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert_close(one, other)
    else:
        assert mine == theirs


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": MESSAGES, "model": "other"},
        {"messages": MESSAGES, "temperature": 3},
        {"messages": MESSAGES, "top_logprobs": 2},
        {"messages": MESSAGES, "logit_bias": {"x": 1}},
        {"messages": MESSAGES, "min_tokens": 30},
        {"messages": MESSAGES, "max_tokens": 5000},
        {"messages": MESSAGES, "store": True},
        {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": MESSAGES, "dflash": {"policy": "static:99"}},
        {"prompt": "a", "best_of": 2},
        {"prompt": "a", "structured_outputs": {"regex": "("}},
        {"messages": MESSAGES, "response_format": {"type": "json_schema"}},
        {"prompt": "a", "bad_words": [" "]},
        {"prompt": [100, 99999]},
        {"prompt": ""},
    ],
)
async def test_a_row_is_refused_as_http_refuses(both: Both, fields: dict[str, Any]) -> None:
    with pytest.raises(ClientError) as caught:
        await both.row(fields)
    refused = (await both.over_http(fields))["error"]
    assert (refused["code"], refused["param"]) == (caught.value.code, caught.value.param)


async def test_there_are_no_streams(both: Both) -> None:
    assert (await both.row({"prompt": "Tom has", "stream": False}))["text"]
    with pytest.raises(ClientError, match="not supported in a batch"):
        await both.row({"prompt": "Tom has", "stream": True})


async def test_the_limit_of_the_command_line_yields_to_the_context(both: Both) -> None:
    row = await both.row({"prompt": [100] * 2040, "ignore_eos": True})
    assert (row["completion_tokens"], row["finish_reason"]) == (8, "length")
