"""The official ``openai`` client against the started application."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import openai
import pytest
from started_server import COSTS, StartedServer

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("default")]

QUESTION = [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many apples now?"}]


def ask(client: openai.OpenAI, model: str, **options: Any) -> Any:
    values: dict[str, Any] = {"messages": QUESTION, "max_tokens": 64, "temperature": 0, **options}
    return client.chat.completions.create(model=model, **values)


def dflash(policy: str) -> dict[str, Any]:
    return {"dflash": {"policy": policy, "stats": True}}


def test_ready_within_a_minute(server: StartedServer) -> None:
    assert server.startup_log
    assert "Traceback" not in server.startup_log


def test_chat_equals_policy_off(client: openai.OpenAI, model: str) -> None:
    plain = ask(client, model, extra_body=dflash("off"))
    fast = ask(client, model, extra_body=dflash("static:16"))
    assert fast.choices[0].message.content == plain.choices[0].message.content != ""
    assert fast.usage == plain.usage
    assert plain.dflash["acceptance_length"] == 1.0
    assert fast.dflash["num_cycles"] < plain.dflash["num_cycles"]
    stats = fast.dflash
    assert sum(stats["committed_per_cycle"]) + 1 == fast.usage.completion_tokens
    assert stats["draft_ms"] > 0 and stats["verify_ms"] > 0 and stats["overhead_ms"] > 0


def test_the_default_policy_is_adaptive_and_gives_what_off_gives(
    client: openai.OpenAI, model: str
) -> None:
    plain = ask(client, model, extra_body=dflash("off"))
    served = ask(client, model, extra_body={"dflash": {"stats": True}})
    assert served.choices[0].message.content == plain.choices[0].message.content
    assert served.dflash["policy"] == "adaptive"
    assert served.dflash["num_cycles"] <= plain.dflash["num_cycles"]


def test_step_costs_are_measured_and_kept(server: StartedServer) -> None:
    (kept,) = COSTS.glob("costs-*.json")
    assert kept.stat().st_size > 1000


def test_stream_delivers_several_tokens_per_chunk(client: openai.OpenAI, model: str) -> None:
    whole = ask(client, model, extra_body=dflash("static:16"))
    chunks = list(
        ask(
            client,
            model,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=dflash("static:16"),
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].dflash["committed_per_cycle"] == whole.dflash["committed_per_cycle"]
    with_text = [c for c in chunks if c.choices and c.choices[0].delta.content]
    assert len(with_text) < whole.usage.completion_tokens


def test_seeded_sampling_repeats_and_ignores_the_policy(client: openai.OpenAI, model: str) -> None:
    texts = {
        ask(client, model, temperature=0.8, seed=11, extra_body=dflash(policy))
        .choices[0]
        .message.content
        for policy in ("off", "static:4", "static-tree:16", "static-tree:48", "adaptive", "table")
    }
    assert len(texts) == 1


def test_fresh_seed_is_returned_and_replays(client: openai.OpenAI, model: str) -> None:
    first = ask(client, model, temperature=1.0, extra_body=dflash("static:8"))
    again = ask(client, model, temperature=1.0, seed=first.dflash["seed"], extra_body=dflash("off"))
    assert again.choices[0].message.content == first.choices[0].message.content


def test_eight_concurrent_requests_of_mixed_lengths(server: StartedServer, model: str) -> None:
    async def run() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.base_url}/v1", api_key="none", max_retries=0
        ) as client:

            async def one(i: int, policy: str, is_stream: bool) -> str:
                options: dict[str, Any] = {
                    "model": model,
                    "messages": [{"role": "user", "content": f"Sam has {i} boxes. " * (1 + 3 * i)}],
                    "max_tokens": 10 + 12 * i,
                    "temperature": 0.7 if i % 2 else 0,
                    "seed": i,
                    "extra_body": {"dflash": {"policy": policy}},
                }
                if not is_stream:
                    answer = await client.chat.completions.create(**options)
                    return answer.choices[0].message.content or ""
                stream = await client.chat.completions.create(stream=True, **options)
                return "".join(
                    [c.choices[0].delta.content or "" async for c in stream if c.choices]
                )

            alone = [await one(i, "off", False) for i in range(8)]
            policies = ["static:16", "adaptive", "static:4", "off"] * 2
            together = await asyncio.gather(*(one(i, policies[i], i % 3 > 0) for i in range(8)))
            return alone, list(together)

    alone, together = asyncio.run(run())
    assert together == alone


def test_log_probabilities_do_not_depend_on_the_policy(client: openai.OpenAI, model: str) -> None:
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "max_tokens": 24}
    answers = [
        ask(client, model, extra_body=dflash(policy), **options) for policy in ("off", "static:8")
    ]
    plain, fast = (answer.choices[0].logprobs.content for answer in answers)
    assert [entry.token for entry in fast] == [entry.token for entry in plain]
    assert [e.logprob for e in fast] == pytest.approx([e.logprob for e in plain], abs=1e-4)
    assert len(plain) == answers[0].usage.completion_tokens
    assert all(entry.top_logprobs[0].token == entry.token for entry in plain)


def test_raw_responses(client: openai.OpenAI, model: str) -> None:
    headers = {"X-Request-Id": "mine-1"}
    options: dict[str, Any] = {"model": model, "messages": QUESTION, "temperature": 0}
    completions = client.chat.completions
    raw = completions.with_raw_response.create(**options, max_tokens=8, extra_headers=headers)
    assert raw.status_code == 200 and raw.http_response.headers["x-request-id"] == "mine-1"
    parsed = raw.parse()
    assert parsed.choices[0].message.content
    # The client's own models are lenient; what was sent must be strictly valid.
    type(parsed).model_validate(json.loads(raw.content), strict=True)
    with completions.with_streaming_response.create(
        **options, max_tokens=8, stream=True, extra_body={"wild": 1}
    ) as streamed:
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.headers["x-dflash-ignored-fields"] == "wild"
        lines = [line for line in streamed.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)


def test_async_client(server: StartedServer, client: openai.OpenAI, model: str) -> None:
    whole = ask(client, model)

    async def run() -> tuple[str, str | None, int]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.base_url}/v1", api_key="none", max_retries=0
        ) as asynchronous:
            options: dict[str, Any] = {"messages": QUESTION, "max_tokens": 64, "temperature": 0}
            stream = await asynchronous.chat.completions.create(
                model=model, stream=True, stream_options={"include_usage": True}, **options
            )
            text, reason, num_tokens = "", None, 0
            async for chunk in stream:
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    reason = choice.finish_reason or reason
                num_tokens = chunk.usage.completion_tokens if chunk.usage else num_tokens
            with pytest.raises(openai.BadRequestError) as caught:
                await asynchronous.chat.completions.create(model=model, **{**options, "n": 1000})
            assert (caught.value.code, caught.value.param) == ("invalid_value", "n")
            raw = await asynchronous.completions.with_raw_response.create(
                model=model, prompt="Tom has", max_tokens=4
            )
            assert raw.parse().choices[0].text
            return text, reason, num_tokens

    choice = whole.choices[0]
    expected = (choice.message.content, choice.finish_reason, whole.usage.completion_tokens)
    assert asyncio.run(run()) == expected


def test_stop_string_cuts_alike_under_every_policy(client: openai.OpenAI, model: str) -> None:
    full = ask(client, model, extra_body=dflash("off")).choices[0].message.content
    stop = full[len(full) // 2 : len(full) // 2 + 3]
    answers = [ask(client, model, stop=stop, extra_body=dflash(p)) for p in ("off", "static:16")]
    for answer in answers:
        assert answer.choices[0].message.content == full[: full.index(stop)]
        assert answer.choices[0].finish_reason == "stop"
        # The statistics end with the text; the first token is the prefill's.
        num_committed = sum(answer.dflash["committed_per_cycle"])
        assert num_committed + 1 == answer.usage.completion_tokens
        assert None not in answer.dflash.values()
    assert answers[0].usage == answers[1].usage


def test_completions_with_text_and_token_ids(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt=["def add(a, b):", "import os"], max_tokens=12, temperature=0
    )
    assert [c.index for c in answer.choices] == [0, 1]
    ids = client.completions.create(
        model=model, prompt=[100, 101, 102], max_tokens=4, temperature=0
    )
    assert ids.usage is not None and ids.usage.prompt_tokens == 3


def test_errors_have_the_clients_classes(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError, match="nope"):
        ask(client, "nope")
    with pytest.raises(openai.BadRequestError, match="tools"):
        ask(client, model, tools=[{"type": "function", "function": {"name": "f"}}])
    with pytest.raises(openai.BadRequestError, match="2048"):
        ask(client, model, messages=[{"role": "user", "content": "word " * 5000}])
    with pytest.raises(openai.BadRequestError, match="static"):
        ask(client, model, extra_body=dflash("static:17"))


def test_leaving_a_stream_ends_the_request(
    server: StartedServer, client: openai.OpenAI, model: str
) -> None:
    stream = ask(client, model, stream=True, max_tokens=1500, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        metrics = httpx.get(f"{server.base_url}/metrics").text
        (line,) = [x for x in metrics.splitlines() if x.startswith("dflash_requests_running ")]
        if float(line.split()[1]) == 0:
            return
    raise AssertionError("the request still runs")


def test_operations_endpoints(server: StartedServer) -> None:
    assert httpx.get(f"{server.base_url}/health").status_code == 200
    assert httpx.get(f"{server.base_url}/version").json()["version"]
    missing = httpx.get(f"{server.base_url}/nowhere")
    assert missing.status_code == 404
    assert set(missing.json()["error"]) == {"message", "type", "param", "code"}
    metrics = httpx.get(f"{server.base_url}/metrics").text
    assert "dflash_accepted_drafts_total{" in metrics


def test_an_answer_follows_its_schema(client: openai.OpenAI, model: str) -> None:
    schema = {
        "type": "object",
        "properties": {"apples": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["apples"],
    }
    form = {"type": "json_schema", "json_schema": {"name": "count", "schema": schema}}
    texts = {
        ask(client, model, response_format=form, extra_body=dflash(policy))
        .choices[0]
        .message.content
        for policy in ("off", "static:8")
    }
    (text,) = texts
    assert 0 <= json.loads(text)["apples"] <= 99
    with pytest.raises(openai.BadRequestError, match="parenthesis"):
        ask(client, model, extra_body={"guided_regex": "(a"})
