"""What the drafter finds on cached pages is as good as what it would have computed: cycle for cycle.

Wrong context would change no token, only acceptance, so equality of outputs says nothing about it.
"""

from __future__ import annotations

import pytest
from local_engines import END_OF_SEQUENCE, Collector, build_engines, encoded_prompts, run

from dflash_wire.ports import EngineLimits
from dflash_wire.records import GenerationRequest
from dflash_wire.sampling import SamplingParams
from gateway.coordinator import Coordinator
from services.local import LocalRing

pytestmark = [pytest.mark.timeout(900)]

NUM_PROMPTS = 10
MAX_TOKENS = 40

Cycles = list[tuple[int, list[int]]]
"""Accepted drafts and committed tokens of each cycle."""


@pytest.fixture(scope="module")
def engines() -> tuple[LocalRing, EngineLimits]:
    return build_engines(num_pages=512, max_step_positions=256)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    long = [ids[:300] for ids in encoded_prompts("long_inputs")[:3]]
    return (long + encoded_prompts("word_problems"))[:NUM_PROMPTS]


def requests_for(
    prompts: list[list[int]], name: str, temperature: float, policy: str
) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            f"{name}-{i}",
            prompt,
            MAX_TOKENS,
            SamplingParams(temperature, seed=i),
            [END_OF_SEQUENCE],
            policy,
        )
        for i, prompt in enumerate(prompts)
    ]


def cycles(sink: Collector, name: str) -> list[Cycles]:
    return [
        [(c.cycle.num_accepted_drafts, c.token_ids) for c in sink.chunks[f"{name}-{i}"] if c.cycle]
        for i in range(NUM_PROMPTS)
    ]


def tau(found: list[Cycles]) -> float:
    committed = [len(token_ids) for sequence in found for _, token_ids in sequence]
    return sum(committed) / len(committed)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_cycles_after_a_hit_are_those_of_a_miss(
    engines: tuple[LocalRing, EngineLimits], prompts: list[list[int]], temperature: float
) -> None:
    """First without a cache, then behind pages of a policy that never drafts, then after a real hit."""
    ring, limits = engines
    sink = Collector()
    without = Coordinator(ring, sink, limits, "off", caches_prefixes=False, cohorts=(1,))
    run(without, requests_for(prompts, "miss", temperature, "static:8"), per_step=1)
    expected = cycles(sink, "miss")

    coordinator = Coordinator(ring, sink, limits, "off", cohorts=(1,))
    for name, policy in (("plain", "off"), ("fill", "static:8"), ("hit", "static:8")):
        run(coordinator, requests_for(prompts, name, temperature, policy), per_step=1)
    assert cycles(sink, "fill") == expected, "pages without context are of no use to a drafter"
    assert all(sink.num_cached(f"hit-{i}") >= 16 for i in range(NUM_PROMPTS))
    assert cycles(sink, "hit") == expected
    assert tau(expected) > 1.5, "drafts are accepted at all"


def test_the_next_turn_drafts_as_well_as_without_a_cache(
    engines: tuple[LocalRing, EngineLimits], prompts: list[list[int]]
) -> None:
    """Its prefix holds an answer: context that came from accepted drafts, cycle by cycle."""
    ring, limits = engines
    sink = Collector()
    coordinator = Coordinator(ring, sink, limits, "static:8", cohorts=(1,))
    run(coordinator, requests_for(prompts, "first", 0.0, "static:8"), per_step=1)
    turns = [
        [*prompt, *sink.tokens(f"first-{i}"), *prompt[-30:]] for i, prompt in enumerate(prompts)
    ]
    run(coordinator, requests_for(turns, "hit", 0.0, "static:8"), per_step=1)
    without = Coordinator(ring, sink, limits, "static:8", caches_prefixes=False, cohorts=(1,))
    run(without, requests_for(turns, "miss", 0.0, "static:8"), per_step=1)
    reused = [sink.num_cached(f"hit-{i}") - len(prompt) for i, prompt in enumerate(prompts)]
    assert max(reused) >= 16, "some pages of answers were found"
    assert cycles(sink, "hit") == cycles(sink, "miss")
