"""64 mixed requests at once on the real engines, every token equal to the request alone under ``off``.

Pools are so small that sequences are preempted, prompts begin alike so that pages are shared, and every
request has its own temperature, seed, policy, priority, stop tokens and length.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
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
from dflash_wire.records import GenerationRequest, StepPlan, StepResult
from dflash_wire.sampling import SamplingParams
from gateway.coordinator import Coordinator
from gateway.coordinator.block_scheduler.build import build_scheduler
from gateway.coordinator.block_scheduler.records import Decision, RowState, StepLoad
from gateway.coordinator.block_scheduler.scheduler import BlockScheduler
from services.local import LocalRing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_REQUESTS = 64
NUM_PAGES = 56
"""896 tokens for 16 rows: less than half of what they grow to."""
CHAINS = ("off", "static:2", "static:3", "static:4", "static:8", "static:11", "static:16")
TREES = ("static-tree:4", "static-tree:8", "static-tree:16", "static-tree:32", "static-tree:64")
POLICIES = CHAINS + TREES
TEMPERATURES = (0.0, 0.7, 1.0)
SHARED_LENGTHS = (33, 64, 150, 380)
"""Tokens that the prompts of one family have in common."""


class WatchedRing:
    """The real ring, noting how wide and how mixed its steps are."""

    def __init__(self, ring: LocalRing) -> None:
        self._ring = ring
        self.most_rows = 0
        self.num_cut = 0
        """Rows that verify less of a block than was drafted."""
        self.num_trees = 0
        self.num_ragged = 0
        """Steps with verify rows of several widths and a prefill chunk beside them."""

    def send(self, plan: StepPlan) -> None:
        widths = {row.width for row in plan.rows if not row.is_prefill}
        has_prefill = any(row.is_prefill for row in plan.rows)
        self.most_rows = max(self.most_rows, len(plan.rows))
        self.num_cut += sum(row.drafted_width > row.width for row in plan.rows if not row.is_tree)
        self.num_trees += sum(row.is_tree for row in plan.rows)
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


@pytest.fixture(scope="module")
def alone(engines: tuple[LocalRing, EngineLimits]) -> Collector:
    """Every request by itself, plainly decoded, without a prefix cache."""
    ring, limits = engines
    sink = Collector()
    coordinator = Coordinator(ring, sink, limits, "off", caches_prefixes=False, cohorts=(1,))
    for request in mixed_requests():
        run(coordinator, [replace(request, policy="off")], per_step=1)
    return sink


class Hostile(BlockScheduler):
    """Any draft width each step, any verify widths within it; it learns as the real one does."""

    def __init__(self, of: BlockScheduler) -> None:
        super().__init__(of.survival, of.cost, of.table)
        self.rng = random.Random(3)

    def decide(self, rows: Sequence[RowState], load: StepLoad) -> Decision:
        draft_width = self.rng.randint(1, 16)
        left = load.max_positions - len(rows)
        widths = []
        for row in rows:
            widths.append(self.rng.randint(1, min(draft_width, row.max_width, left + 1)))
            left -= widths[-1] - 1
        return Decision(0, draft_width, widths, 1.0, 1.0, "speculate", "any")


@pytest.mark.parametrize(
    ("policy", "num_cohorts"), [("adaptive", 1), (None, 2)], ids=["all", "some"]
)
def test_widths_at_random_change_no_token(
    engines: tuple[LocalRing, EngineLimits],
    alone: Collector,
    policy: str | None,
    num_cohorts: int,
) -> None:
    """The block scheduler may choose what it likes; ``some``: beside rows of all other policies."""
    ring, limits = engines
    hostile = Hostile(build_scheduler(limits.max_draft_block_size))
    requests = [
        replace(request, policy=policy if policy or i % 2 else request.policy)
        for i, request in enumerate(mixed_requests())
    ]
    together = Collector()
    watched = WatchedRing(ring)
    coordinator = Coordinator(
        watched, together, limits, "adaptive", cohorts=(num_cohorts,), scheduler=hostile
    )
    run(coordinator, requests, per_step=16)
    for request in requests:
        assert together.answer(request.request_id) == alone.answer(request.request_id)
    assert watched.num_ragged > 10 and watched.num_cut > 100
    assert coordinator.snapshot().num_preemptions > 0


@pytest.mark.parametrize("num_cohorts", [1, 2])
def test_64_mixed_requests_equal_each_alone(
    engines: tuple[LocalRing, EngineLimits], alone: Collector, num_cohorts: int
) -> None:
    ring, limits = engines
    requests = mixed_requests()
    together, watched = Collector(), WatchedRing(ring)
    coordinator = Coordinator(watched, together, limits, "static:8", cohorts=(num_cohorts,))
    run(coordinator, requests, per_step=16)

    answers = {r.request_id: together.answer(r.request_id) for r in requests}
    assert answers == {r.request_id: alone.answer(r.request_id) for r in requests}

    # All of it must really have happened.
    now = coordinator.snapshot()
    assert now.num_preemptions > 5
    cached = [together.num_cached(r.request_id) for r in requests]
    assert sum(n > 0 for n in cached) > 10 and max(cached) > 100
    assert watched.most_rows >= 8 // num_cohorts and watched.num_ragged > 10
    assert watched.num_trees > 100
    assert {reason for _, reason in answers.values()} == {"stop", "length"}
    assert now.totals.num_cycle_tokens / now.totals.num_cycles > 1.2
    assert now.num_free_pages == now.num_pages == NUM_PAGES
