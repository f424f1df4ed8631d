"""64 mixed requests at once on the real engines, every token equal to the request alone under ``off``.

Pools are so small that sequences are preempted, prompts begin alike so that pages are shared, and every
request has its own temperature, seed, policy, priority, stop tokens and length.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from local_engines import (
    END_OF_SEQUENCE,
    Collector,
    build_engines,
    encoded_prompts,
    run,
)

from dflash_wire.ports import EngineLimits
from dflash_wire.records import GenerationRequest, SamplingParams, StepPlan, StepResult
from gateway.coordinator import Coordinator
from services.local import LocalRing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_REQUESTS = 64
NUM_PAGES = 56
"""896 tokens for 16 rows: less than half of what they grow to."""
POLICIES = ("off", "static:2", "static:3", "static:4", "static:8", "static:11", "static:16")
TEMPERATURES = (0.0, 0.8)
SHARED_LENGTHS = (33, 64, 150, 380)
"""Tokens that the prompts of one family have in common."""


class WatchedRing:
    """The real ring, noting how wide and how mixed its steps are."""

    def __init__(self, ring: LocalRing) -> None:
        self._ring = ring
        self.most_rows = 0
        self.num_ragged = 0
        """Steps with verify rows of several widths and a prefill chunk beside them."""

    def send(self, plan: StepPlan) -> None:
        widths = {row.width for row in plan.rows if not row.is_prefill}
        has_prefill = any(row.is_prefill for row in plan.rows)
        self.most_rows = max(self.most_rows, len(plan.rows))
        self.num_ragged += len(widths) > 1 and has_prefill
        self._ring.send(plan)

    def receive(self, step_id: int) -> StepResult:
        return self._ring.receive(step_id)


@pytest.fixture(scope="module")
def engines() -> tuple[LocalRing, EngineLimits]:
    return build_engines(num_pages=NUM_PAGES, max_rows=16, max_step_positions=192)


def mixed_requests() -> list[GenerationRequest]:
    rng = random.Random(11)
    own, long = encoded_prompts("word_problems,chat"), encoded_prompts("long_inputs")
    requests = []
    for i in range(NUM_REQUESTS):
        prompt = own[i]
        if i % 3:  # two of three begin like others
            family = rng.randrange(len(SHARED_LENGTHS))
            prompt = long[family][: SHARED_LENGTHS[family]] + prompt[: rng.choice((1, 20))]
        stops = [END_OF_SEQUENCE, *rng.sample(range(4, 400), k=rng.choice((0, 0, 12)))]
        requests.append(
            GenerationRequest(
                f"r{i}",
                prompt,
                max_tokens=rng.choice((1, 7, 30, 60, 90)),
                sampling=SamplingParams(
                    rng.choice(TEMPERATURES), rng.choice((1.0, 0.9)), rng.choice((0, 30)), 100 + i
                ),
                stop_token_ids=stops if i % 5 else [],
                policy=POLICIES[i % len(POLICIES)],
                cache_salt=rng.choice(("", "", "", "tenant")),
                priority=rng.choice((-1, 0, 0, 1)),
            )
        )
    return requests


@pytest.mark.parametrize("cohorts", [(1,), (2,)], ids=["one cohort", "two cohorts"])
def test_64_mixed_requests_equal_each_alone(
    engines: tuple[LocalRing, EngineLimits], cohorts: tuple[int, ...]
) -> None:
    ring, limits = engines
    requests = mixed_requests()

    alone = Collector()
    plain = Coordinator(ring, alone, limits, "off", caches_prefixes=False)
    for request in requests:
        run(plain, [replace(request, policy="off")], per_step=1)

    together, watched = Collector(), WatchedRing(ring)
    coordinator = Coordinator(watched, together, limits, "static:8", cohorts=cohorts)
    run(coordinator, requests, per_step=16)

    answers = {r.request_id: together.answer(r.request_id) for r in requests}
    assert answers == {r.request_id: alone.answer(r.request_id) for r in requests}

    # All of it must really have happened.
    now = coordinator.snapshot()
    assert now.num_preemptions > 5
    cached = [together.num_cached(r.request_id) for r in requests]
    assert sum(n > 0 for n in cached) > 10 and max(cached) > 100
    assert watched.most_rows >= 10 // cohorts[0] and watched.num_ragged > 10
    assert {reason for _, reason in answers.values()} == {"stop", "length"}
    assert now.totals.num_cycle_tokens / now.totals.num_cycles > 1.2
    assert now.num_free_pages == now.num_pages == NUM_PAGES
