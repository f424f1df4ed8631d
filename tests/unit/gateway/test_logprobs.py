"""Log-probabilities in OpenAI's shapes, whole and streamed, of exactly the tokens that count."""

from __future__ import annotations

import pytest
from gateway_fakes import Encode, Serve, cycle, last, sse_data

from dflash_wire.processors import TokenLogprobs
from dflash_wire.records import GenerationRequest, TokenChunk
from drafter.training.demo.tokenizer import TURN_END

pytestmark = pytest.mark.asyncio


def said(chunk: TokenChunk, *others: int) -> TokenChunk:
    """The chunk with a log-probability for each token, and alternatives."""
    chunk.logprobs = [
        TokenLogprobs(-0.5 - token_id, list(others), [-0.25 * (i + 1) for i in range(len(others))])
        for token_id in chunk.token_ids
    ]
    return chunk


async def test_chat(serve: Serve, encode: Encode) -> None:
    quick, end = encode(" quick"), encode(TURN_END)
    served = serve(lambda _: [said(cycle(quick), 5, 6), said(last(end), 7, 8)])
    answer = await served.openai.chat.completions.create(
        model="demo/model",
        messages=[{"role": "user", "content": "hi"}],
        logprobs=True,
        top_logprobs=2,
    )
    assert served.engine.requests[0].num_logprobs == 2
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and logprobs.refusal is None
    assert answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens == len(quick) + 1
    assert "".join(entry.token for entry in logprobs.content[:-1]) == " quick"
    assert logprobs.content[-1].token == TURN_END
    for entry, token_id in zip(logprobs.content, quick + end, strict=True):
        assert entry.logprob == -0.5 - token_id
        assert entry.bytes == list(entry.token.encode())
        assert [top.logprob for top in entry.top_logprobs] == [-0.25, -0.5]
        assert all(top.bytes == list(top.token.encode()) for top in entry.top_logprobs)


async def test_completion(serve: Serve, encode: Encode) -> None:
    tokens = encode("the quick")
    served = serve(lambda _: [said(last(tokens, "length"), tokens[0], 300)])
    answer = await served.openai.completions.create(model="demo/model", prompt="x", logprobs=2)
    assert served.engine.requests[0].num_logprobs == 2
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None and logprobs.top_logprobs is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text == "the quick"
    assert logprobs.token_logprobs == [-0.5 - token_id for token_id in tokens]
    offsets = [sum(map(len, logprobs.tokens[:i])) for i in range(len(tokens))]
    assert logprobs.text_offset == offsets
    # The chosen token is among them even if it is not one of the likeliest.
    assert [token in top for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True)]
    assert logprobs.top_logprobs[0][logprobs.tokens[0]] == -0.25
    assert len(logprobs.top_logprobs[1]) == 3


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.parametrize("stop", [None, "ick", "quick b"])
async def test_streams_add_up_to_the_whole(
    serve: Serve, encode: Encode, endpoint: str, stop: str | None
) -> None:
    """However text is held back, each counted token is reported once, with text of its own or without."""
    tokens = encode("the quick brown fox")

    def script(_: object) -> list[TokenChunk]:
        return [said(cycle(tokens[:2])), said(cycle(tokens[2:5])), said(last(tokens[5:], "length"))]

    asked = {"logprobs": 0} if endpoint == "complete" else {"logprobs": True}
    whole = (await getattr(serve(script), endpoint)(stop=stop, **asked)).json()
    options = {"include_usage": True}
    stream = await getattr(serve(script), endpoint)(
        stop=stop, stream=True, stream_options=options, **asked
    )
    *events, done = sse_data(stream.text)
    assert done == "[DONE]"
    (choice,) = whole["choices"]
    pieces = [c["logprobs"] for event in events for c in event["choices"] if c["logprobs"]]
    if endpoint == "chat":
        got = [entry for piece in pieces for entry in piece["content"]]
        assert got == choice["logprobs"]["content"]
        assert len(got) == whole["usage"]["completion_tokens"]
    else:
        for name, values in choice["logprobs"].items():
            assert [value for piece in pieces for value in piece[name]] == values
            assert len(values) == whole["usage"]["completion_tokens"]
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert (whole["usage"]["completion_tokens"] < len(tokens)) == (stop is not None)


async def test_half_a_character_is_named_by_its_bytes(serve: Serve, encode: Encode) -> None:
    tokens = encode("é")
    assert len(tokens) == 2
    served = serve(lambda _: [said(last(tokens, "length"))])
    (choice,) = (await served.chat(logprobs=True)).json()["choices"]
    assert choice["message"]["content"] == "é"
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["\ufffd", "\ufffd"]
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == "é"


@pytest.mark.parametrize(
    ("endpoint", "fields", "param"),
    [
        ("chat", {"top_logprobs": 2}, "top_logprobs"),
        ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat", {"logprobs": 1}, "logprobs"),
        ("complete", {"logprobs": True}, "logprobs"),
        ("complete", {"logprobs": 21}, "logprobs"),
        ("complete", {"logprobs": -1}, "logprobs"),
        ("complete", {"top_logprobs": 1}, "top_logprobs"),
    ],
)
async def test_refused(serve: Serve, endpoint: str, fields: dict[str, object], param: str) -> None:
    served = serve([])
    response = await getattr(served, endpoint)(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert served.engine.requests == []


def with_prompt(chunk: TokenChunk, num_prompt: int) -> TokenChunk:
    """The chunk as a request's first one that asked about a prompt of so many tokens."""
    chunk.prompt_logprobs = [
        TokenLogprobs(-1.0 - i, [9, 8], [-0.5, -0.75]) for i in range(num_prompt - 1)
    ]
    return chunk


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs(serve: Serve, encode: Encode, stream: bool) -> None:
    """As evaluation harnesses ask: the prompt's tokens first, of which the first has no log-probability."""
    prompt, tokens = encode("the quick"), encode(" brown fox")

    def script(_: object) -> list[TokenChunk]:
        first = with_prompt(said(cycle(tokens[:1])), len(prompt))
        return [first, said(last(tokens[1:], "length"))]

    served = serve(script)
    response = await served.complete(prompt="the quick", echo=True, logprobs=1, stream=stream)
    (request,) = served.engine.requests
    assert (request.num_logprobs, request.num_prompt_logprobs) == (1, 1)
    if stream:
        *events, _ = sse_data(response.text)
        choices = [choice for event in events for choice in event["choices"]]
    else:
        choices = response.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "the quick brown fox"
    told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert [t for one in told for t in one["token_logprobs"]] == [
        None,
        *[-1.0 - i for i in range(len(prompt) - 1)],
        *[-0.5 - token_id for token_id in tokens],
    ]
    names = [t for one in told for t in one["tokens"]]
    assert "".join(names) == "the quick brown fox"
    assert [t for one in told for t in one["text_offset"]] == [
        sum(map(len, names[:i])) for i in range(len(names))
    ]
    assert told[0]["top_logprobs"][0] is None
    assert all("prompt_logprobs" not in choice for choice in choices)


async def test_echo_alone_is_text(serve: Serve, encode: Encode) -> None:
    served = serve(lambda _: [last(encode(" fox"), "length")])
    (choice,) = (await served.complete(prompt=encode("quick brown"), echo=True)).json()["choices"]
    assert (choice["text"], choice["logprobs"]) == ("quick brown fox", None)
    assert served.engine.requests[0].num_prompt_logprobs is None
    refused = await served.chat(echo=True)
    assert refused.json()["error"]["code"] == "unsupported_parameter"


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_logprobs(serve: Serve, encode: Encode, endpoint: str, stream: bool) -> None:
    def script(request: GenerationRequest) -> list[TokenChunk]:
        return [with_prompt(last(encode(" fox"), "length"), len(request.prompt_token_ids))]

    served = serve(script)
    response = await getattr(served, endpoint)(prompt_logprobs=1, stream=stream)
    prompt = served.engine.requests[0].prompt_token_ids
    if stream:
        *events, _ = sse_data(response.text)
        (told,) = [
            choice["prompt_logprobs"]
            for event in events
            for choice in event["choices"]
            if "prompt_logprobs" in choice
        ]
    else:
        whole = response.json()
        told = (whole if endpoint == "chat" else whole["choices"][0])["prompt_logprobs"]
    assert told[0] is None and len(told) == len(prompt)
    for i, (entry, token_id) in enumerate(zip(told[1:], prompt[1:], strict=True)):
        assert next(iter(entry)) == "9" and len(entry) == 2 - (token_id == 9)
        assert (entry["9"]["logprob"], entry["9"]["rank"]) == (-0.5, 1)
        if token_id != 9:
            assert (entry[str(token_id)]["logprob"], entry[str(token_id)]["rank"]) == (
                -1.0 - i,
                None,
            )


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
async def test_unasked_there_are_none(serve: Serve, endpoint: str, encode: Encode) -> None:
    served = serve(lambda _: [last(encode("the"), "length")])
    (choice,) = (await getattr(served, endpoint)()).json()["choices"]
    assert choice["logprobs"] is None
    assert served.engine.requests[0].num_logprobs is None
