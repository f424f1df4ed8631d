"""The embedded pair under every processor: the tokens and log-probabilities of plain decoding, faster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from local_engines import END_OF_SEQUENCE, ROOT, Collector, build_engines, encoded_prompts, run

from dflash_wire.ports import EngineLimits
from dflash_wire.processors import Processors, TokenLogprobs
from dflash_wire.records import GenerationRequest
from dflash_wire.sampling import SamplingParams
from gateway.chat_tokenizer import ChatTokenizer
from gateway.coordinator import Coordinator
from services.local import LocalRing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Engines = tuple[LocalRing, EngineLimits]
ENDS = [END_OF_SEQUENCE]
ALL = Processors(1.1, 0.3, 0.2, [20, 30], [1.0, -5.0], [[40], [7, 8]], [], 20, ENDS)
ASKED = (
    Processors(repetition_penalty=1.3),
    Processors(presence_penalty=0.8),
    Processors(frequency_penalty=0.5),
    Processors(frequency_penalty=-0.2),
    Processors(biased_token_ids=list(range(100, 130)), biases=[-100.0] * 30),
    Processors(min_tokens=60, end_token_ids=ENDS),
    ALL,
    None,
)


@pytest.fixture(scope="module")
def engines() -> Engines:
    # So few pages that some sequences are preempted.
    return build_engines(num_pages=40, max_rows=8, max_step_positions=192)


def requests() -> list[GenerationRequest]:
    prompts = encoded_prompts("word_problems,chat")
    tokenizer = ChatTokenizer.load(str(ROOT / "models/demo/target"))
    space_answer = tokenizer.encode_plain(" The answer is")
    asked = [*ASKED, Processors(bad_words=[space_answer, tokenizer.encode_plain(" plums")])]
    return [
        GenerationRequest(
            f"r{i}",
            prompts[i],
            40 + i,
            SamplingParams((0.0, 0.7, 1.0)[i % 3], seed=i, min_p=(0.0, 0.1)[i % 2]),
            ENDS,
            processors=asked[i % len(asked)],
            num_logprobs=(None, 0, 5)[i % 3],
        )
        for i in range(3 * len(asked))
    ]


def answers(
    engines: Engines, policy: str, at_once: int, **more: bool
) -> tuple[Collector, Coordinator]:
    ring, limits = engines
    sink = Collector()
    limits = replace(limits, max_rows=at_once)
    coordinator = Coordinator(ring, sink, limits, policy, cohorts=(1,), **more)
    run(coordinator, requests(), per_step=at_once)
    return sink, coordinator


@pytest.fixture(scope="module")
def plain(engines: Engines) -> Collector:
    return answers(engines, "off", 1, caches_prefixes=False)[0]


def logprobs(sink: Collector, request_id: str) -> list[TokenLogprobs]:
    return [entry for chunk in sink.chunks[request_id] for entry in chunk.logprobs or []]


@pytest.mark.parametrize("policy", ["static:4", "static:16", "static-tree:16", "static-tree:64"])
def test_every_processor_equals_off(engines: Engines, plain: Collector, policy: str) -> None:
    got, coordinator = answers(engines, policy, 8)
    for request in requests():
        request_id = request.request_id
        assert got.answer(request_id) == plain.answer(request_id), request
        one, other = logprobs(got, request_id), logprobs(plain, request_id)
        assert len(one) == (0 if request.num_logprobs is None else len(got.tokens(request_id)))
        for mine, theirs in zip(one, other, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert mine.top_logprobs == pytest.approx(theirs.top_logprobs, abs=1e-4)
    now = coordinator.snapshot()
    assert now.num_preemptions > 0
    assert now.totals.num_cycle_tokens > 1.3 * now.totals.num_cycles


def test_processors_change_answers(engines: Engines, plain: Collector) -> None:
    """Or equality would prove little."""
    ring, limits = engines
    sink = Collector()
    bare = [replace(request, processors=None) for request in requests()]
    run(Coordinator(ring, sink, limits, "off", cohorts=(1,)), bare, per_step=8)
    changed = [r for r in bare if sink.answer(r.request_id) != plain.answer(r.request_id)]
    assert len(changed) > len(bare) // 4
