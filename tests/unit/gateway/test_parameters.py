from __future__ import annotations

import httpx
import pytest
from gateway_fakes import Serve, Served, last

pytestmark = pytest.mark.asyncio

UNSUPPORTED_BOTH = {
    "best_of": 2,
    "suffix": "x",
    "guided_decoding_backend": "x",
    "guided_whitespace_pattern": " ",
    "grammar": "x",
    "ebnf": "x",
    "logits_processors": ["x"],
    "use_beam_search": True,
    "skip_special_tokens": False,
    "lora_name": "x",
    "store": True,
    "service_tier": "flex",
}
UNSUPPORTED_CHAT = {
    "echo": True,
    "functions": [{"name": "f"}],
    "audio": {"voice": "x"},
    "modalities": ["text", "audio"],
    "prediction": {"type": "content"},
    "reasoning_effort": "high",
}
NEUTRAL = {
    "best_of": 1,
    "logprobs": False,
    "top_logprobs": 0,
    "store": False,
    "service_tier": "auto",
    "echo": False,
    "suffix": "",
    "response_format": {"type": "text"},
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0,
    "min_tokens": 0,
    "bad_words": [],
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "modalities": ["text"],
}


@pytest.mark.parametrize("name", UNSUPPORTED_BOTH)
@pytest.mark.parametrize("endpoint", ["chat", "complete"])
async def test_unsupported(endpoint: str, name: str, serve: Serve) -> None:
    served = serve([])
    response = await getattr(served, endpoint)(**{name: UNSUPPORTED_BOTH[name]})
    check_refused(response, name, served)


@pytest.mark.parametrize("name", UNSUPPORTED_CHAT)
async def test_unsupported_in_chat(name: str, serve: Serve) -> None:
    served = serve([])
    check_refused(await served.chat(**{name: UNSUPPORTED_CHAT[name]}), name, served)


def check_refused(response: httpx.Response, name: str, served: Served) -> None:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", name)
    assert name in error["message"]
    assert served.engine.requests == []


async def test_a_flag_is_not_a_number(serve: Serve) -> None:
    check_refused(await (served := serve([])).chat(best_of=True), "best_of", served)


async def test_nested_unsupported(serve: Serve) -> None:
    served = serve([])
    calls = [{"role": "assistant", "content": "a", "function_call": {"name": "f"}}]
    check_refused(await served.chat(messages=calls), "messages[0].function_call", served)
    check_refused(
        await served.chat(chat_template_kwargs={"enable_thinking": True, "tone": "dry"}),
        "chat_template_kwargs.tone",
        served,
    )
    options = {"include_obfuscation": True}
    response = await served.chat(stream=True, stream_options=options)
    check_refused(response, "stream_options.include_obfuscation", served)


async def test_a_refusal_does_not_repeat_what_is_long(serve: Serve) -> None:
    response = await serve([]).chat(chat_template_kwargs={"x" * 3000: True})
    assert response.status_code == 400
    assert len(response.content) < 1000


async def test_neutral_values_and_nulls(serve: Serve) -> None:
    served = serve(lambda _: [last([])])
    response = await served.chat(**NEUTRAL)
    assert response.status_code == 200, response.text
    assert "x-dflash-ignored-fields" not in response.headers
    nulls = dict.fromkeys([*UNSUPPORTED_BOTH, *UNSUPPORTED_CHAT])
    assert (await served.chat(**nulls)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_fields_are_listed(serve: Serve, stream: bool | None) -> None:
    served = serve([last([])])
    response = await served.chat(
        stream=stream,
        wild=1,
        mood={"a": "b"},
        messages=[{"role": "user", "content": "hi", "mood": "good"}],
        **{"bad\r\nX-Evil: 1": 2, "ü": 3},
    )
    assert response.status_code == 200
    assert response.headers["x-dflash-ignored-fields"] == (
        "wild, mood, bad%0D%0AX-Evil%3A%201, %C3%BC, messages[0].mood"
    )
    assert "x-evil" not in response.headers


async def test_labels_of_the_client_are_accepted_and_not_ignored(serve: Serve) -> None:
    labels = {
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "metadata": {"a": "b"},
    }
    response = await serve([last([])]).chat(**labels)
    assert response.status_code == 200
    assert "x-dflash-ignored-fields" not in response.headers


async def test_the_list_of_unknown_fields_is_bounded(serve: Serve) -> None:
    fields = {f"{i}{'x' * 100}": i for i in range(25)}
    response = await serve([last([])]).chat(**fields)
    listed = response.headers["x-dflash-ignored-fields"].split(", ")
    assert len(listed) == 21
    assert listed[-1] == "+5"
    assert all(len(name) <= 64 for name in listed)
