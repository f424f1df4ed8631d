from __future__ import annotations

import pytest
from gateway_fakes import NUM_DRAFT_TOKENS, Encode, Serve, cycle, last, sse_data

from dflash_wire.records import TokenChunk
from gateway.state import GatewaySettings

pytestmark = pytest.mark.asyncio

CHAT = {"model": "demo/model", "messages": [{"role": "user", "content": "hi"}]}


async def test_openai_client_whole(serve: Serve, encode: Encode) -> None:
    served = serve([encode("the quick"), last([*encode(" fox"), *encode("<|im_end|>")])])
    answer = await served.openai.chat.completions.create(**CHAT)
    choice = answer.choices[0]
    assert choice.message.content == "the quick fox"
    assert (choice.message.role, choice.finish_reason, choice.index) == ("assistant", "stop", 0)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert (answer.model, answer.system_fingerprint) == ("demo/model", "dflash-1.2.3")
    num_output = len(encode("the quick")) + len(encode(" fox")) + 1
    num_prompt = len(encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"))
    assert answer.usage.completion_tokens == num_output
    assert answer.usage.prompt_tokens == num_prompt
    assert answer.usage.total_tokens == num_prompt + num_output
    assert answer.choices[0].logprobs is None
    assert not hasattr(answer, "dflash")


async def test_openai_client_stream_with_usage_and_stats(serve: Serve, encode: Encode) -> None:
    brown, fox = encode(" brown"), encode(" fox")
    served = serve([encode("the quick"), cycle(brown), last(fox, "length")])
    stream = await served.openai.chat.completions.create(
        **CHAT,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"dflash": {"policy": "static:4", "stats": True}},
    )
    chunks = [chunk async for chunk in stream]
    first, *middle, finish, usage = chunks
    assert first.choices[0].delta.role == "assistant"
    assert first.choices[0].delta.content == ""
    # One event per committed chunk, however many tokens it holds.
    assert [chunk.choices[0].delta.content for chunk in middle] == ["the quick", " brown", " fox"]
    assert all(chunk.choices[0].finish_reason is None for chunk in [first, *middle])
    assert finish.choices[0].finish_reason == "length"
    assert finish.choices[0].delta.content is None
    assert usage.choices == []
    assert usage.usage.completion_tokens == len(encode("the quick brown fox"))
    assert usage.dflash["policy"] == "static:4"
    assert usage.dflash["acceptance_length"] == (len(brown) + len(fox)) / 2
    assert len({chunk.id for chunk in chunks}) == 1
    assert served.engine.requests[0].policy == "static:4"


async def test_raw_stream(serve: Serve, encode: Encode) -> None:
    quick, end = encode(" quick"), encode("<|im_end|>")
    served = serve([encode("the"), cycle([*quick, *quick]), last(end)])
    response = await served.chat(stream=True, dflash={"stats": True, "policy": None}, seed=5)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    *chunks, done = sse_data(response.text)
    assert done == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "the"},
        {"content": " quick quick"},
        {},
    ]
    assert all("usage" not in chunk for chunk in chunks)
    assert [("dflash" in chunk) for chunk in chunks] == [False, False, False, True]
    assert chunks[-1]["dflash"] == {
        "policy": "static:8",
        "drafter": "default",
        "seed": 5,
        "num_cycles": 2,
        "num_draft_tokens": 2 * NUM_DRAFT_TOKENS,
        "num_accepted_drafts": 2 * len(quick) - 1,
        "acceptance_length": (2 * len(quick) + 1) / 2,
        "committed_per_cycle": [2 * len(quick), 1],
        "draft_ms": 20.0,
        "verify_ms": 40.0,
        "overhead_ms": 1.0,
    }


async def test_every_chunk_has_null_usage_before_the_usage_chunk(
    serve: Serve, encode: Encode
) -> None:
    served = serve([encode("the"), last([])])
    response = await served.chat(stream=True, stream_options={"include_usage": True})
    *chunks, usage, done = sse_data(response.text)
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert (usage["choices"], done) == ([], "[DONE]")
    assert usage["usage"]["completion_tokens"] == len(encode("the"))


async def test_whole_stats_and_fresh_seed(serve: Serve, encode: Encode) -> None:
    served = serve(lambda _: [last(encode("the"))])
    seeds = set()
    for _ in range(3):
        stats = (await served.chat(dflash={"stats": True})).json()["dflash"]
        seeds.add(stats["seed"])
        assert served.engine.requests[-1].sampling.seed == stats["seed"]
    assert len(seeds) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)


async def test_request_reaches_the_engine_with_defaults(
    serve: Serve, encode: Encode, settings: GatewaySettings
) -> None:
    served = serve(lambda _: [last([])])
    await served.chat(seed=-1)
    request = served.engine.requests[0]
    prompt = encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert request.prompt_token_ids == prompt
    assert request.max_tokens == settings.max_context - len(prompt)
    assert request.stop_token_ids == list(settings.eos_token_ids)
    assert request.policy is None
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.9, 20)
    assert sampling.seed == 2**63 - 1


async def test_request_reaches_the_engine_as_asked(serve: Serve) -> None:
    served = serve(lambda _: [last([])])
    response = await served.chat(
        temperature=0,
        top_p=0.5,
        top_k=-1,
        seed=2**63 + 7,
        max_tokens=5,
        max_completion_tokens=5,
        stop_token_ids=[9, 7, 9],
        ignore_eos=True,
        user="someone",
        dflash={"policy": "off"},
    )
    assert response.status_code == 200
    request = served.engine.requests[0]
    assert (request.max_tokens, request.stop_token_ids, request.policy) == (5, [7, 9], "off")
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0, 0.5, 0)
    assert sampling.seed == 7


async def test_roles_and_parts(serve: Serve, encode: Encode) -> None:
    served = serve(lambda _: [last([])])
    response = await served.chat(
        messages=[
            {"role": "developer", "content": "one"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "two"}, {"type": "text", "text": "three"}],
            },
            {"role": "assistant", "content": "four", "refusal": None, "tool_calls": []},
            {"role": "tool", "content": "fox", "tool_call_id": "call_1"},
        ]
    )
    assert response.status_code == 200
    assert served.engine.requests[0].prompt_token_ids == encode(
        "<|im_start|>system\none<|im_end|>\n<|im_start|>user\ntwo\nthree<|im_end|>\n"
        "<|im_start|>assistant\nfour<|im_end|>\n<|im_start|>tool\nfox<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_stop_string_across_chunks_ends_the_request(serve: Serve, encode: Encode) -> None:
    before = encode("the quick bro")
    completing, after = [*encode("w"), *encode("n")], encode(" fox jumps")
    script = [before, cycle([*completing, *after]), encode(" over"), last(encode(" never"))]
    served = serve(script)
    body = (await served.chat(stop=["brown"], dflash={"stats": True})).json()
    assert body["choices"][0]["message"]["content"] == "the quick "
    assert body["choices"][0]["finish_reason"] == "stop"
    # The token that completed the stop string is the last one that counts.
    assert body["usage"]["completion_tokens"] == len(before) + len(completing)
    assert served.engine.num_yielded == 2
    assert served.engine.num_open == 0
    # So the cycle counts up to it, with all of its drafts and time.
    del body["dflash"]["seed"]
    assert body["dflash"] == {
        "policy": "static:8",
        "drafter": "default",
        "num_cycles": 1,
        "num_draft_tokens": NUM_DRAFT_TOKENS,
        "num_accepted_drafts": len(completing),
        "acceptance_length": len(completing),
        "committed_per_cycle": [len(completing)],
        "draft_ms": 10.0,
        "verify_ms": 20.0,
        "overhead_ms": 0.5,
    }


async def test_stop_string_never_leaks_into_a_stream(serve: Serve, encode: Encode) -> None:
    served = serve([encode("the END"), encode(" of"), encode(" EN"), encode("D?"), last([])])
    response = await served.chat(stream=True, stop="END?")
    *chunks, _ = sse_data(response.text)
    contents = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert contents == ["", "the ", "END of", " ", ""]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_multi_byte_character_over_chunks(serve: Serve, encode: Encode) -> None:
    first, *rest = encode("😀")
    served = serve([[first], rest[:1], [*rest[1:], *encode("!")], last([])])
    *chunks, _ = sse_data((await served.chat(stream=True)).text)
    contents = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert contents == ["", "😀!", None]


async def test_ignore_eos_goes_past_the_end_token(serve: Serve, encode: Encode) -> None:
    end = encode("<|im_end|>")
    script = [[*encode("the"), *end], last(encode(" fox"), "length")]
    cut = (await serve(script).chat()).json()["choices"][0]
    assert (cut["message"]["content"], cut["finish_reason"]) == ("the", "stop")
    full = (await serve(script).chat(ignore_eos=True)).json()["choices"][0]
    assert (full["message"]["content"], full["finish_reason"]) == ("the fox", "length")


async def test_request_id_is_echoed_or_made(serve: Serve) -> None:
    served = serve(lambda _: [last([])])
    headers = {"X-Request-Id": "mine-1"}
    sent = await served.http.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert sent.headers["x-request-id"] == "mine-1"
    made = [(await served.chat()).headers["x-request-id"] for _ in range(2)]
    assert len(set(made)) == 2
    bad = await served.http.get("/health", headers={"X-Request-Id": "a b"})
    assert bad.headers["x-request-id"] != "a b"
    # Engines get ids of our own: a client may send the same id twice.
    assert len({request.request_id for request in served.engine.requests}) == 3


async def test_chunks_after_the_finish_are_not_waited_for(serve: Serve, encode: Encode) -> None:
    served = serve([last(encode("the")), TokenChunk("", encode(" fox"))])
    body = (await served.chat()).json()
    assert body["choices"][0]["message"]["content"] == "the"
    assert served.engine.num_yielded == 1
