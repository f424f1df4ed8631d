"""Sampling by rejection on the embedded pair: text as likely as plain decoding's, and chains for trees."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest
from local_engines import Collector, build_engines, encoded_prompts, run

from dflash_wire.ports import EngineLimits
from dflash_wire.processors import Processors
from dflash_wire.records import GenerationRequest, StepPlan, StepResult
from dflash_wire.sampling import SamplingParams
from gateway.coordinator import Coordinator
from services.local import LocalRing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_REQUESTS = 80
MAX_TOKENS = 64
"""Nothing ends a request sooner, so 5,120 tokens are scored in each mode at each temperature."""
Engines = tuple[LocalRing, EngineLimits]


@pytest.fixture(scope="module")
def engines() -> Engines:
    return build_engines(num_pages=512, max_rows=16)


def requests(temperature: float, rejects: bool, first_seed: int) -> list[GenerationRequest]:
    prompts = encoded_prompts("word_problems,chat")[:NUM_REQUESTS]
    sampling = SamplingParams(temperature, rejects=rejects)
    return [
        GenerationRequest(
            f"r{i}",
            prompt,
            MAX_TOKENS,
            replace(sampling, seed=first_seed + i),
            num_logprobs=0,
        )
        for i, prompt in enumerate(prompts)
    ]


class RowCounter:
    """The real ring, counting trees and drafts."""

    def __init__(self, ring: LocalRing) -> None:
        self._ring = ring
        self.num_trees = self.num_drafting = 0

    def send(self, plan: StepPlan) -> None:
        self.num_trees += sum(row.is_tree for row in plan.rows)
        self.num_drafting += sum(row.width > 1 for row in plan.rows)
        self._ring.send(plan)

    def receive(self, step_id: int) -> StepResult:
        return self._ring.receive(step_id)


def answers(
    engines: Engines, asked: Iterable[GenerationRequest], policy: str
) -> tuple[Collector, float, RowCounter]:
    """What came, tokens per cycle, and what kind of rows there were."""
    ring, limits = engines
    sink, counter = Collector(), RowCounter(ring)
    coordinator = Coordinator(counter, sink, limits, policy, cohorts=(1,))
    run(coordinator, asked, per_step=16)
    totals = coordinator.snapshot().totals
    return sink, totals.num_cycle_tokens / max(1, totals.num_cycles), counter


def mean_logprobs(sink: Collector) -> list[float]:
    """Of each answer, by the model itself before any processing."""
    scored = [
        [e.logprob for c in chunks for e in c.logprobs or []] for chunks in sink.chunks.values()
    ]
    assert sum(map(len, scored)) >= 5000
    return [statistics.fmean(logprobs) for logprobs in scored]


@pytest.mark.parametrize("temperature", [0.5, 0.8, 1.0])
def test_text_is_as_likely_as_plain_decodings(engines: Engines, temperature: float) -> None:
    """Wrong sampling shows in the likelihood first. Other seeds, so that nothing is equal by coupling."""
    plain, _, _ = answers(engines, requests(temperature, False, 1000), "off")
    coupled, coupled_tau, _ = answers(engines, requests(temperature, False, 5000), "static:8")
    rejected, tau, _ = answers(engines, requests(temperature, True, 9000), "static:8")
    expected = mean_logprobs(plain)
    modes = (mean_logprobs(coupled), mean_logprobs(rejected))
    perplexities = [math.exp(-statistics.fmean(mode)) for mode in (expected, *modes)]
    said = ", ".join(f"{perplexity:.4f}" for perplexity in perplexities)
    print(f"T {temperature}: tau {coupled_tau:.3f} coupled, {tau:.3f} rejection")
    print(f"perplexity off, coupled, rejection: {said}")
    for got in modes:
        error = (statistics.variance(got) + statistics.variance(expected)) / NUM_REQUESTS
        difference = statistics.fmean(got) - statistics.fmean(expected)
        assert abs(difference) < 4 * error**0.5, f"{difference} +- {error**0.5}"
    assert tau > 0.9 * coupled_tau


def test_plain_decoding_is_the_same_in_both_modes(engines: Engines) -> None:
    coupled, _, _ = answers(engines, requests(0.8, False, 3)[:8], "off")
    rejected, _, _ = answers(engines, requests(0.8, True, 3)[:8], "off")
    assert [rejected.tokens(f"r{i}") for i in range(8)] == [
        coupled.tokens(f"r{i}") for i in range(8)
    ]


@pytest.mark.parametrize("policy", ["static:8", "static-tree:32"])
def test_greedy_rows_and_tree_policies(engines: Engines, policy: str) -> None:
    """At temperature 0 nothing is rejected by chance; with one, a tree's policy drafts chains."""
    plain, _, _ = answers(engines, requests(0.0, False, 0)[:8], "off")
    greedy, _, _ = answers(engines, requests(0.0, True, 0)[:8], policy)
    assert [greedy.tokens(f"r{i}") for i in range(8)] == [plain.tokens(f"r{i}") for i in range(8)]
    _, tau, counter = answers(engines, requests(0.8, True, 0)[:8], policy)
    assert counter.num_trees == 0 and counter.num_drafting > 0
    assert tau > 1.3


def test_processors_hold_under_rejection(engines: Engines) -> None:
    """What is forbidden never comes, and equal seeds and widths repeat the text."""
    allowed = list(range(20, 400))
    processors = Processors(
        frequency_penalty=0.2, allowed_token_ids=allowed, bad_words=[[25], [30, 31]]
    )
    asked = [replace(request, processors=processors) for request in requests(1.0, True, 7)[:8]]
    first, _, _ = answers(engines, asked, "static:8")
    again, _, _ = answers(engines, asked, "static:8")
    for request in asked:
        tokens = first.tokens(request.request_id)
        assert tokens == again.tokens(request.request_id)
        assert set(tokens) <= set(allowed) - {25}
        assert (30, 31) not in set(pairwise(tokens))
