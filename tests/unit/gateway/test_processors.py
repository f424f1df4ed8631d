"""What chat and completions make of penalties, biases, words and minimal lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gateway_fakes import Encode, Serve, last
from hypothesis import given
from hypothesis import strategies as st

from dflash_wire.processors import Processors
from dflash_wire.records import GenerationRequest
from gateway.app import create_app
from gateway.bad_words import bad_word_ids
from gateway.chat_tokenizer import ChatTokenizer
from gateway.detokenize import SequenceText
from gateway.metrics import GatewayMetrics
from gateway.state import GatewaySettings, SamplingDefaults

both = pytest.mark.parametrize("endpoint", ["chat", "complete"])
asyncio = pytest.mark.asyncio


async def asked(serve: Serve, endpoint: str, **fields: object) -> GenerationRequest:
    served = serve([last([])])
    response = await getattr(served, endpoint)(**fields)
    assert response.status_code == 200, response.text
    assert "x-dflash-ignored-fields" not in response.headers
    (request,) = served.engine.requests
    return request


@both
@asyncio
async def test_all_processors_reach_the_engine(serve: Serve, endpoint: str, encode: Encode) -> None:
    request = await asked(
        serve,
        endpoint,
        min_p=0.05,
        presence_penalty=-0.5,
        frequency_penalty=1,
        repetition_penalty=1.1,
        logit_bias={"5": -100, "17": 2.5, "9": 0},
        bad_words=["fox"],
        allowed_token_ids=[9, 5, 5],
        min_tokens=3,
        stop_token_ids=[7],
        max_tokens=9,
        ignore_eos=True,
    )
    assert request.sampling.min_p == 0.05
    assert request.processors == Processors(
        repetition_penalty=1.1,
        presence_penalty=-0.5,
        frequency_penalty=1.0,
        biased_token_ids=[5, 17],
        biases=[-100.0, 2.5],
        bad_words=[encode("fox"), encode(" fox")],
        allowed_token_ids=[5, 9],
        min_tokens=3,
        end_token_ids=[7],
    )


@both
@asyncio
async def test_neutral_values_ask_for_nothing(serve: Serve, endpoint: str) -> None:
    request = await asked(
        serve,
        endpoint,
        min_p=0,
        presence_penalty=0,
        frequency_penalty=0.0,
        repetition_penalty=1,
        logit_bias={},
        bad_words=[],
        allowed_token_ids=[],
        min_tokens=0,
    )
    assert (request.processors, request.sampling.min_p) == (None, 0.0)
    assert (await asked(serve, endpoint, logit_bias={"3": 0})).processors is None


@asyncio
async def test_min_tokens_hold_back_the_end_of_sequence(
    serve: Serve, settings: GatewaySettings
) -> None:
    processors = (await asked(serve, "chat", min_tokens=2)).processors
    assert processors == Processors(min_tokens=2, end_token_ids=list(settings.eos_token_ids))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("presence_penalty", 2.1),
        ("frequency_penalty", "1"),
        ("repetition_penalty", 0),
        ("logit_bias", [1]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"²": 1}),
        ("logit_bias", {"330": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": True}),
        ("logit_bias", {"5": "1"}),
        ("logit_bias", {"5": {"{x}": 1}}),
        ("logit_bias", {str(i): 1 for i in range(1025)}),
        ("bad_words", "x"),
        ("bad_words", [" "]),
        ("bad_words", ["x"] * 129),
        ("bad_words", ["x" * 257]),
        ("allowed_token_ids", [330]),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", [True]),
        ("min_tokens", -1),
        ("min_tokens", 11),
    ],
)
@both
@asyncio
async def test_wrong_values_are_refused(
    serve: Serve,
    settings: GatewaySettings,
    tokenizer: ChatTokenizer,
    endpoint: str,
    name: str,
    value: object,
) -> None:
    served = serve([])
    app = create_app(
        served.engine,
        tokenizer,
        replace(settings, max_body_bytes=100_000),
        metrics=GatewayMetrics(),
    )
    served = type(served)(app, served.engine, served.metrics)
    response = await getattr(served, endpoint)(max_tokens=10, **{name: value})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"].split(".")[0].split("[")[0]) == ("invalid_value", name)
    assert served.engine.requests == []


@asyncio
async def test_the_model_has_defaults(
    serve: Serve, settings: GatewaySettings, tokenizer: ChatTokenizer
) -> None:
    served = serve([last([])])
    sampling = SamplingDefaults(min_p=0.2, repetition_penalty=1.3)
    app = create_app(served.engine, tokenizer, replace(settings, sampling=sampling))
    served = type(served)(app, served.engine, served.metrics)
    await served.chat()
    await served.chat(min_p=0, repetition_penalty=1)
    silent, own = served.engine.requests
    assert silent.processors == Processors(repetition_penalty=1.3)
    assert (silent.sampling.min_p, own.sampling.min_p, own.processors) == (0.2, 0.0, None)


def test_bad_words_behind_a_space(tokenizer: ChatTokenizer, encode: Encode) -> None:
    assert bad_word_ids(["fox", " fox", "fox"], tokenizer) == [encode("fox"), encode(" fox")]
    assert len(encode("fox")) != len(encode(" fox"))  # vLLM would let the second through


ALPHABET = st.lists(st.sampled_from(["a", "b", "ab", ""]), max_size=14)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


class Letters:
    """A detokenizer whose tokens are given texts."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def push(self, token_id: int) -> str:
        return self._texts[token_id]

    def push_all(self, token_ids: list[int]) -> str:
        return "".join(map(self.push, token_ids))

    def flush(self) -> str:
        return ""


@given(texts=ALPHABET, stops=STOPS, min_tokens=st.integers(0, 8))
def test_stop_strings_count_behind_min_tokens(
    texts: list[str], stops: list[str], min_tokens: int
) -> None:
    """A stop string counts if it ends behind the first ``min_tokens`` tokens; it may begin among them."""
    exempt = len("".join(texts[:min_tokens]))
    whole = "".join(texts)
    ends = [
        (start + len(stop), start)
        for stop in stops
        for start in range(len(whole))
        if whole.startswith(stop, start) and start + len(stop) > exempt
    ]
    expected = (whole[: min(ends)[1]], "stop") if ends else (whole, "length")
    text = SequenceText(Letters(texts), stops, [], min_tokens=min_tokens)
    got = "".join(text.push([i]) for i in range(len(texts))) + text.finish("length")
    assert (got, text.finish_reason) == expected


@both
@asyncio
async def test_how_drafts_are_accepted(
    serve: Serve, settings: GatewaySettings, tokenizer: ChatTokenizer, endpoint: str
) -> None:
    by_rejection = {"sampling": "rejection", "stats": True}
    assert not (await asked(serve, endpoint)).sampling.samples_drafts
    assert (await asked(serve, endpoint, dflash=by_rejection)).sampling.samples_drafts
    assert not (
        await asked(serve, endpoint, dflash=by_rejection, temperature=0)
    ).sampling.samples_drafts
    served = serve([last([])])
    answer = (await getattr(served, endpoint)(dflash=by_rejection)).json()
    assert answer["dflash"]["sampling"] == "rejection"
    wrong = await getattr(served, endpoint)(dflash={"sampling": "lossy"})
    assert wrong.json()["error"]["param"] == "dflash.sampling"
    sampling = replace(settings.sampling, rejects=True)
    app = create_app(served.engine, tokenizer, replace(settings, sampling=sampling))
    served = type(served)(app, served.engine, served.metrics)
    await getattr(served, endpoint)()
    await getattr(served, endpoint)(dflash={"sampling": "coupled"})
    assert [request.sampling.samples_drafts for request in served.engine.requests[-2:]] == [
        True,
        False,
    ]
