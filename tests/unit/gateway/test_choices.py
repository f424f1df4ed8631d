"""Several choices per prompt, token ids, stop strings that stay, and usage while it streams."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from gateway_fakes import Encode, Item, Script, Serve, cycle, last, sse_data
from hypothesis import given
from hypothesis import strategies as st

from dflash_wire.records import GenerationRequest, TokenChunk
from gateway.choice_seeds import SEED_RANGE, choice_seed
from gateway.stop_strings import StopMatcher

pytestmark = pytest.mark.asyncio

NUMBERS = ["one", "two", "three", "four"]


def by_seed(encode: Encode) -> Script:
    """Answers that depend on the seed alone."""

    def script(request: GenerationRequest) -> list[Item]:
        number = NUMBERS[request.sampling.seed % 4]
        return [encode("the "), last(encode(f"{number} {request.sampling.seed}"))]

    return script


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
async def test_choice_0_is_what_n_1_gives_and_each_can_be_had_alone(
    endpoint: str, serve: Serve, encode: Encode
) -> None:
    served = serve(by_seed(encode))
    ask: Callable[..., object] = getattr(served, endpoint)

    def texts(body: dict[str, list[dict[str, object]]]) -> list[object]:
        return [choice.get("text") or choice["message"] for choice in body["choices"]]

    one = (await ask(seed=7)).json()
    several = (await ask(seed=7, n=3, dflash={"stats": True})).json()
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2]
    assert texts(several)[0] == texts(one)[0]
    seeds = [stats["seed"] for stats in several["dflash"]]
    assert seeds[0] == 7 and len(set(seeds)) == 3
    for seed, text in zip(seeds, texts(several), strict=True):
        assert texts((await ask(seed=seed)).json()) == [text]


async def test_a_fresh_seed_is_one_per_prompt(serve: Serve, encode: Encode) -> None:
    served = serve(by_seed(encode))
    await served.complete(prompt=["a", "b"], n=2)
    seeds = [request.sampling.seed for request in served.engine.requests]
    assert len(set(seeds)) == 4
    assert seeds[1] == choice_seed(seeds[0], 1) and seeds[3] == choice_seed(seeds[2], 1)


@given(seed=st.integers(0, SEED_RANGE - 1), choice=st.integers(0, 63))
async def test_choice_seeds_are_seeds(seed: int, choice: int) -> None:
    made = choice_seed(seed, choice)
    assert 0 <= made < SEED_RANGE
    assert (made == seed) == (choice == 0)


async def test_choices_of_several_prompts_are_in_order_and_prompts_count_once(
    serve: Serve, encode: Encode
) -> None:
    def script(request: GenerationRequest) -> list[Item]:
        assert request.prompt_token_ids is not None
        end = last(encode("x"))
        end.num_cached_tokens = 2
        return [end]

    served = serve(script)
    body = (await served.complete(prompt=[[5, 6, 7], [8, 9, 10, 11]], n=2, max_tokens=3)).json()
    prompts = [request.prompt_token_ids for request in served.engine.requests]
    assert prompts == [[5, 6, 7]] * 2 + [[8, 9, 10, 11]] * 2
    assert len({request.request_id for request in served.engine.requests}) == 4
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 7
    assert body["usage"]["completion_tokens"] == 4
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 4


async def test_choices_stream_side_by_side(serve: Serve, encode: Encode) -> None:
    served = serve(by_seed(encode))
    whole = (await served.chat(seed=3, n=2)).json()
    *chunks, done = sse_data((await served.chat(seed=3, n=2, stream=True)).text)
    assert done == "[DONE]"
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert mine[0]["delta"]["role"] == "assistant"
        text = "".join(c["delta"].get("content", "") for c in mine)
        assert text == choice["message"]["content"]
        assert mine[-1]["finish_reason"] == "stop"


STOPPED = ["the quick", " brown", " fox"]


async def test_token_ids_end_with_the_stop_string(serve: Serve, encode: Encode) -> None:
    tokens = [encode(text) for text in STOPPED]
    served = serve(lambda _: [cycle(ids) for ids in tokens] + [last([])])
    kept = encode("the quick brown")
    for options in ({}, {"include_stop_str_in_output": True}):
        body = (await served.complete(stop="brown", return_token_ids=True, **options)).json()
        (choice,) = body["choices"]
        assert choice["text"] == ("the quick brown" if options else "the quick ")
        assert choice["token_ids"] == kept
        assert choice["prompt_token_ids"] == encode("hi")
        assert body["usage"]["completion_tokens"] == len(kept)


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
async def test_token_ids_of_a_stream_are_those_of_the_whole(
    endpoint: str, serve: Serve, encode: Encode
) -> None:
    first, *rest = encode("😀")
    end = encode("<|im_end|>")
    script = [encode("the "), [first], cycle(rest), last([*encode("fox"), *end])]
    served = serve(lambda _: script)
    ask = getattr(served, endpoint)
    whole = (await ask(return_token_ids=True)).json()
    choice = whole["choices"][0]
    assert choice["token_ids"] == [*encode("the "), first, *rest, *encode("fox"), *end]
    *chunks, _ = sse_data((await ask(return_token_ids=True, stream=True)).text)
    streamed = [token for c in chunks for token in c["choices"][0].get("token_ids", [])]
    assert streamed == choice["token_ids"]
    prompts = [
        ids
        for c in chunks
        if (ids := c.get("prompt_token_ids") or c["choices"][0].get("prompt_token_ids"))
    ]
    assert prompts == [whole.get("prompt_token_ids") or choice["prompt_token_ids"]]
    assert prompts[0] == served.engine.requests[0].prompt_token_ids
    # Bytes of half a character are tokens without text, and come at once.
    with_ids = [c["choices"][0] for c in chunks if "token_ids" in c["choices"][0]]
    texts = [c["text"] if endpoint == "complete" else c["delta"]["content"] for c in with_ids]
    assert texts == ["the ", "", "😀", "fox"]


async def test_without_the_flag_there_are_no_token_ids(serve: Serve, encode: Encode) -> None:
    served = serve(lambda _: [last(encode("the"))])
    assert "token_ids" not in (await served.chat()).text
    assert "token_ids" not in (await served.complete(stream=True, return_token_ids=False)).text


@pytest.mark.parametrize("keeps", [False, True])
async def test_a_stop_token_with_text_is_kept_if_asked_for(
    keeps: bool, serve: Serve, encode: Encode
) -> None:
    the, dot = encode("the"), encode(".")
    served = serve([[*the, *dot], last([])])
    body = (await served.complete(stop_token_ids=dot, include_stop_str_in_output=keeps)).json()
    assert body["choices"][0]["text"] == ("the." if keeps else "the")
    assert body["choices"][0]["finish_reason"] == "stop"


@given(text=st.text("abc", max_size=12), cuts=st.lists(st.integers(0, 12)))
async def test_a_kept_stop_string_does_not_depend_on_the_pieces(text: str, cuts: list[int]) -> None:
    def result(pieces: list[str]) -> str:
        matcher = StopMatcher(["ab", "bcc", "ca"], keeps_match=True)
        return "".join(map(matcher.push, pieces)) + matcher.flush()

    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    ends = [text.find(s) + len(s) for s in ("ab", "bcc", "ca") if s in text]
    assert result(pieces) == text[: min(ends, default=len(text))]


async def test_continuous_usage_grows_to_the_last(serve: Serve, encode: Encode) -> None:
    served = serve(lambda _: [encode("the quick"), cycle(encode(" fox")), last([])])
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = await served.chat(stream=True, n=2, stream_options=options)
    *chunks, usage, _ = sse_data(response.text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] == 0
    assert counts[-1] == usage["usage"]["completion_tokens"]
    assert {c["usage"]["prompt_tokens"] for c in chunks} == {usage["usage"]["prompt_tokens"]}
    assert all(
        chunk["usage"]["total_tokens"]
        == chunk["usage"]["prompt_tokens"] + chunk["usage"]["completion_tokens"]
        for chunk in chunks
    )
    alone = await served.chat(stream=True, stream_options={"continuous_usage_stats": True})
    assert all("usage" not in chunk for chunk in sse_data(alone.text)[:-1])


async def test_an_error_of_one_choice_before_the_first_byte_is_a_status(
    serve: Serve, encode: Encode
) -> None:
    def script(request: GenerationRequest) -> list[Item]:
        if request.sampling.seed == 7:
            return [TokenChunk("", [], "stop")]
        return [ValueError("broken")]

    served = serve(script)
    response = await served.chat(seed=7, n=2)
    assert response.status_code == 500
    assert served.engine.num_open == 0


async def test_priority_reaches_the_engine(serve: Serve) -> None:
    served = serve(lambda _: [last([])])
    await served.chat(priority=-3, n=2)
    await served.complete()
    assert [request.priority for request in served.engine.requests] == [-3, -3, 0]
    response = await served.chat(priority=2**31)
    assert response.json()["error"]["param"] == "priority"
