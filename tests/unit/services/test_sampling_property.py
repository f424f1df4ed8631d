"""Whatever is asked for and however it is drafted, the answer is plain decoding's.

Random parameters, prompts, policies, widths and drafters on a random target whose pools are so small that
sequences are preempted. Plain decoding itself is held against transformers' own pass and processors in plain
Python. ``DFLASH_CASES`` sets how many cases there are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from local_engines import Collector
from naive_processors import naive_choice, naive_process
from oracle_pair import VOCAB, OracleDrafter, OraclePair
from toy_grammars import END, GRAMMARS, legal_tokens

from dflash_wire.processors import Processors, TokenLogprobs
from dflash_wire.records import GenerationRequest
from dflash_wire.sampling import SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

NUM_CASES = int(os.environ.get("DFLASH_CASES", "300"))
POLICIES = (
    "static:2",
    "static:4",
    "static:8",
    "static:16",
    "static-tree:8",
    "static-tree:16",
    "adaptive",
)
"""The last with widths at random."""
NEAR = 1e-4

# Few different tokens, so that bad words and penalties meet what is generated.
palettes = st.lists(st.integers(0, VOCAB - 1), min_size=4, max_size=8, unique=True)
grammars = st.sampled_from(sorted(GRAMMARS.values()))


def rarely(strategy: st.SearchStrategy[object], nothing: object) -> st.SearchStrategy[object]:
    return st.just(nothing) | st.just(nothing) | strategy


@st.composite
def processors(draw: st.DrawFn, palette: list[int]) -> Processors | None:
    if draw(st.integers(0, 4)) == 0:
        return None
    some = st.lists(st.sampled_from(palette), max_size=4, unique=True)
    biased = draw(rarely(some, []))
    words = st.lists(st.sampled_from(palette), min_size=1, max_size=3)
    return Processors(
        draw(rarely(st.floats(0.3, 3), 1.0)),
        draw(rarely(st.floats(-2, 2), 0.0)),
        draw(rarely(st.floats(-2, 2), 0.0)),
        biased,
        [draw(st.floats(-20, 20)) for _ in biased],
        draw(rarely(st.lists(words, max_size=12), [])),
        draw(rarely(some, [])),
        draw(st.just(0) | st.integers(1, 20)),
        draw(st.just([]) | some | st.just([END])),
        draw(rarely(grammars, "")),
    )


@st.composite
def requests(draw: st.DrawFn, index: int, palette: list[int]) -> GenerationRequest:
    tokens = st.sampled_from(palette) | st.integers(0, VOCAB - 1)
    sampling = SamplingParams(
        draw(st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.7])),
        draw(st.sampled_from([1.0, 1.0, 0.9, 0.5])),
        draw(st.sampled_from([0, 0, 1, 5])),
        draw(st.integers(0, 2**63 - 1)),
        draw(st.sampled_from([0.0, 0.0, 0.05, 0.3])),
    )
    asked = draw(processors(palette))
    return GenerationRequest(
        f"r{index}",
        # The same beginnings, so that pages are shared.
        palette + palette + draw(st.lists(tokens, max_size=6)),
        draw(st.integers(1, 20)),
        sampling,
        draw(st.just([])) if asked is None else asked.end_token_ids,
        processors=asked,
        num_logprobs=draw(st.sampled_from([None, None, 0, 3])),
        num_prompt_logprobs=draw(st.sampled_from([None, None, None, 0, 2])),
    )


@st.composite
def cases(draw: st.DrawFn) -> list[GenerationRequest]:
    palette = draw(palettes)
    if draw(st.integers(0, 7)) > 0:
        return [draw(requests(i, palette)) for i in range(draw(st.integers(1, 4)))]
    # So much for so few pages that sequences are preempted within their grammars, which chance seldom does.
    return [crowded(draw(requests(i, palette)), draw(grammars)) for i in range(4)]


def crowded(asked: GenerationRequest, grammar: str) -> GenerationRequest:
    processors = replace(asked.processors or Processors(), grammar=grammar)
    return replace(asked, max_tokens=20, processors=processors)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> OraclePair:
    return OraclePair(tmp_path_factory.mktemp("target"))


def logprobs(sink: Collector, request: GenerationRequest) -> list[TokenLogprobs] | None:
    chunks = sink.chunks[request.request_id]
    if request.num_logprobs is None:
        assert all(chunk.logprobs is None for chunk in chunks)
        return None
    for chunk in chunks:
        assert chunk.logprobs is not None and len(chunk.logprobs) == len(chunk.token_ids)
    return [entry for chunk in chunks for entry in chunk.logprobs or []]


def prompt_logprobs(sink: Collector, request: GenerationRequest) -> list[TokenLogprobs] | None:
    first, *others = sink.chunks[request.request_id]
    assert all(chunk.prompt_logprobs is None for chunk in others)
    assert (first.prompt_logprobs is None) == (request.num_prompt_logprobs is None)
    return first.prompt_logprobs


def assert_near(
    got: Sequence[TokenLogprobs] | None, wanted: Sequence[TokenLogprobs] | None
) -> None:
    assert (got is None) == (wanted is None)
    for one, other in zip(got or [], wanted or [], strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=NEAR)
        assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=NEAR)


def assert_equals_naive(pair: OraclePair, request: GenerationRequest, sink: Collector) -> None:
    """Token by token, from one dense pass of transformers over the whole text."""
    prompt = request.prompt_token_ids
    tokens, reason = sink.answer(request.request_id)
    with torch.inference_mode():
        logits = pair.model(torch.tensor([prompt + tokens])).logits[0]
    said = logprobs(sink, request)
    for i, token_id in enumerate(tokens):
        row = logits[len(prompt) + i - 1]
        values = row.tolist()
        asked = request.processors
        if asked is not None:
            legal = legal_tokens(asked.grammar, tokens[:i]) if asked.grammar else None
            assert legal is None or token_id in legal
            values = naive_process(values, asked, prompt, tokens[:i], legal)
        chosen, lead = naive_choice(values, request.sampling, len(prompt) + i)
        assert chosen == token_id or lead < NEAR, f"token {i}: {token_id}, not {chosen}"
        assert (token_id in request.stop_token_ids) == (i + 1 == len(tokens) and reason == "stop")
        if said is not None:
            wanted = row.log_softmax(dim=-1)
            assert said[i].logprob == pytest.approx(wanted[token_id].item(), abs=NEAR)
            top = wanted.topk(request.num_logprobs or 0)
            assert said[i].top_logprobs == pytest.approx(top.values.tolist(), abs=NEAR)
            assert len(said[i].top_token_ids) == request.num_logprobs
    assert reason == "stop" or len(tokens) == request.max_tokens
    about_prompt = prompt_logprobs(sink, request)
    if about_prompt is not None:
        wanted = logits[: len(prompt) - 1].log_softmax(dim=-1)
        assert len(about_prompt) == len(prompt) - 1
        for i, entry in enumerate(about_prompt):
            assert entry.logprob == pytest.approx(wanted[i, prompt[i + 1]].item(), abs=NEAR)
            top = wanted[i].topk(request.num_prompt_logprobs or 0).values.tolist()
            assert entry.top_logprobs == pytest.approx(top, abs=NEAR)


num_preempted: list[int] = []
num_accepted: list[int] = []
num_shared: list[int] = []
num_forced: list[int] = []
num_preempted_in_grammar: list[int] = []


@settings(
    max_examples=NUM_CASES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    cases(),
    st.sampled_from(POLICIES),
    st.sampled_from([0.0, 0.7, 0.95, 1.0]),
    st.integers(1, 2),
    st.integers(0, 2**32),
)
def test_any_policy_equals_off(
    pair: OraclePair,
    asked: list[GenerationRequest],
    policy: str,
    accuracy: float,
    cohorts: int,
    seed: int,
) -> None:
    plain, _ = pair.answer(asked, "off")
    answers = [plain.tokens(r.request_id) for r in asked]
    drafter = OracleDrafter(asked, answers, accuracy, seed)
    forced = pair.verifier.num_forced_tokens
    got, coordinator = pair.answer(asked, policy, drafter, cohorts, seed)
    num_forced.append(pair.verifier.num_forced_tokens - forced)
    for request in asked:
        assert got.answer(request.request_id) == plain.answer(request.request_id)
        assert_near(logprobs(got, request), logprobs(plain, request))
        assert_near(prompt_logprobs(got, request), prompt_logprobs(plain, request))
        assert_equals_naive(pair, request, plain)
    now = coordinator.snapshot()
    assert now.num_free_pages == now.num_pages
    num_preempted.append(now.num_preemptions)
    if all(r.processors is not None and r.processors.grammar for r in asked):
        num_preempted_in_grammar.append(now.num_preemptions)
    num_accepted.append(now.totals.num_accepted_drafts)
    num_shared.append(sum(plain.num_cached(r.request_id) for r in asked))


def test_the_cases_were_worth_it() -> None:
    """Runs behind the other: drafts accepted, sequences preempted and pages shared in a good part of them."""
    assert sum(n > 0 for n in num_accepted) > 0.4 * len(num_accepted)
    assert sum(n > 0 for n in num_preempted) > 0.02 * len(num_preempted)
    assert sum(n > 0 for n in num_shared) > 0.1 * len(num_shared)
    assert sum(n > 0 for n in num_forced) > 0.1 * len(num_forced)
    assert sum(n > 0 for n in num_preempted_in_grammar) > 0.01 * len(num_accepted)
