"""EAGLE-3, prompt lookup and no drafter at all behind the real coordinator: no token changes with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from eagle_helpers import decoder_values, random_tensors, save_public
from local_engines import Collector
from other_drafters import (
    CHAINS,
    NUM_REQUESTS,
    TREES,
    VOCAB,
    WatchedRing,
    answers,
    build,
    mixed_requests,
    save_pair,
    spec_of,
)

from dflash_wire.codec import decode_plan, decode_result, encode_plan, encode_result
from dflash_wire.drafters import DrafterLimits
from dflash_wire.errors import ConfigError
from dflash_wire.records import GenerationRequest, StepPlan
from dflash_wire.sampling import SamplingParams
from drafter.eagle3.engine import Eagle3Drafter
from drafter.ngram import NgramDrafter
from gateway.coordinator.block_scheduler.build import build_scheduler
from gateway.coordinator.block_scheduler.cost_table import CostTable
from gateway.coordinator.block_scheduler.scheduler import SchedulerSettings
from gateway.coordinator.block_scheduler.sweep import sweep, sweep_cells
from services.engines import build_drafter, draft_facts, load_drafter
from services.local import LocalRing, build_local_ring

pytestmark = [pytest.mark.unit, pytest.mark.timeout(300)]

KINDS = ("eagle3", "ngram")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pair")
    save_pair(path)
    return path


@pytest.fixture(scope="module")
def plain(pair: Path) -> Collector:
    """Every request by itself, plainly decoded."""
    ring, limits = build(pair, "none")
    sink, _ = answers(ring, limits, mixed_requests(("off",)), per_step=1, cohorts=(1,))
    return sink


def name_of(pair: Path, kind: str) -> str:
    return "ngram" if kind == "ngram" else str(pair / kind)


@pytest.mark.parametrize("cohorts", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_mixed_requests_equal_each_alone(
    pair: Path, plain: Collector, kind: str, cohorts: int
) -> None:
    """With prefixes shared, sequences preempted, chains and trees, two steps in flight."""
    ring, limits = build(pair, name_of(pair, kind))
    watched = WatchedRing(ring)
    requests = mixed_requests((*CHAINS, *TREES))
    sink, coordinator = answers(watched, limits, requests, cohorts=(cohorts,))
    for request in requests:
        assert sink.answer(request.request_id) == plain.answer(request.request_id)
    now = coordinator.snapshot()
    assert now.num_preemptions > 0
    assert sum(sink.num_cached(r.request_id) > 0 for r in requests) > 3
    assert now.totals.num_accepted_drafts > 0
    told = [i for plan in watched.plans for i in plan.ingests]
    assert told and all(i.token_ids is not None and len(i.token_ids) == i.num_tokens for i in told)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_after_a_hit_are_those_of_a_miss(pair: Path, kind: str) -> None:
    """Shared pages bring what the drafter knows of them."""
    ring, limits = build_local_ring(spec_of(pair, name_of(pair, kind), num_pages=400))
    requests = [
        replace(r, prompt_token_ids=r.prompt_token_ids + [i] * 3, sampling=SamplingParams())
        for i, r in enumerate(mixed_requests(("static:5",)))
        if len(r.prompt_token_ids) > 10
    ]
    miss, hit = WatchedRing(ring), WatchedRing(ring)
    answers(miss, limits, requests, per_step=1, caches_prefixes=False, cohorts=(1,))
    sink, coordinator = answers(hit, limits, requests, per_step=1, cohorts=(1,))
    assert sum(sink.num_cached(r.request_id) > 0 for r in requests) > 3
    assert coordinator.snapshot().num_preemptions == 0
    assert hit.drafts == miss.drafts and any(map(any, hit.drafts.values()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_may_be_replaced_at_any_time(pair: Path, plain: Collector, kind: str) -> None:
    """A new one knows nothing of the sequences; tokens do not depend on what it knows."""
    ring, limits = build(pair, name_of(pair, kind))
    spec = spec_of(pair, name_of(pair, kind))

    class Restarted(WatchedRing):
        def send(self, plan: StepPlan) -> None:
            if len(self.plans) % 7 == 6:
                model = load_drafter(spec)
                features = [self.ring.verifier.feature_pool]
                self.ring = LocalRing([build_drafter(spec, model, features)], self.ring.verifier)
            super().send(plan)

    requests = mixed_requests(CHAINS)
    sink, _ = answers(Restarted(ring), limits, requests, cohorts=(1,))
    for request in requests:
        assert sink.answer(request.request_id) == plain.answer(request.request_id)


def test_only_verified_drafts_are_counted(pair: Path) -> None:
    """Where nothing repeats, nothing is drafted, and the row is no wider than plain decoding."""
    ring, limits = build(pair, "ngram")
    watched = WatchedRing(ring)
    new = GenerationRequest(
        "new", list(range(9, 40)), 30, SamplingParams(1.0, seed=1), [], "static:8"
    )
    repeated = GenerationRequest("repeated", [5, 6, 7] * 9, 30, policy="static:8")
    sink, coordinator = answers(watched, limits, [new, repeated], cohorts=(1,))
    cycles = {name: [c.cycle for c in sink.chunks[name] if c.cycle] for name in sink.chunks}
    assert {c.num_draft_tokens for c in cycles["new"]} <= {0, *range(1, 8)}
    assert cycles["new"][0].num_draft_tokens == 0
    assert max(c.num_draft_tokens for c in cycles["repeated"]) == 7
    assert all(
        c.num_accepted_drafts <= c.num_draft_tokens for mine in cycles.values() for c in mine
    )
    assert coordinator.snapshot().totals.num_draft_tokens == sum(
        c.num_draft_tokens for mine in cycles.values() for c in mine
    )
    short = [result for result in watched.results if result.num_drafted is not None]
    assert short and decode_result(encode_result(short[0])) == short[0]
    plan = next(plan for plan in watched.plans if plan.ingests)
    assert decode_plan(encode_plan(plan)) == plan


def test_drafters_of_several_kinds_serve_one_target(pair: Path, plain: Collector) -> None:
    ring, limits = build(pair, str(pair / "eagle3"), lookup="ngram")
    assert limits.drafters == (
        DrafterLimits("default", 16, reads_tokens=True),
        DrafterLimits("lookup", 16, reads_tokens=True),
    )
    requests = [
        replace(request, drafter="lookup" if i % 2 else None)
        for i, request in enumerate(mixed_requests(CHAINS))
    ]
    sink, coordinator = answers(ring, limits, requests, cohorts=(1,))
    for request in requests:
        assert sink.answer(request.request_id) == plain.answer(request.request_id)
    assert all(of.num_draft_tokens for of in coordinator.snapshot().totals.by_drafter)


@pytest.mark.parametrize("policy", ["adaptive", "table", "off"])
def test_without_a_drafter_every_policy_is_plain_decoding(
    pair: Path, plain: Collector, policy: str
) -> None:
    ring, limits = build(pair, "none")
    assert (ring.drafters, limits.max_draft_block_size) == ([], 1)
    watched = WatchedRing(ring)
    requests = mixed_requests((policy,))
    sink, _ = answers(watched, limits, requests, cohorts=(2,))
    for request in requests:
        assert sink.answer(request.request_id) == plain.answer(request.request_id)
    assert not any(plan.needs_drafter for plan in watched.plans)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sweep_measures_what_it_says(pair: Path, kind: str) -> None:
    """Every made-up row is drafted in full, so that a width's price is that of its positions."""
    spec = spec_of(pair, name_of(pair, kind), num_pages=400, max_context=200)
    spec = replace(spec, ngram_match=(6, 8))  # more than a step is fed with
    ring, limits = build_local_ring(spec)
    watched = WatchedRing(ring)
    widths = [1, 2, 8, 16]
    samples = sweep(watched, limits, widths, most_s=600.0)
    assert {(s.num_rows, s.width) for s in samples} == {
        (c.num_rows, c.width) for c in sweep_cells(limits, widths)
    }
    assert all(result.num_drafted is None for result in watched.results)
    table = CostTable(samples)
    settings = SchedulerSettings(draft_widths=tuple(widths))
    scheduler = build_scheduler(limits.max_draft_block_size, table, settings=settings)
    requests = mixed_requests(("adaptive",))
    sink, _ = answers(watched, limits, requests, cohorts=(1,), scheduler=scheduler)
    assert len(sink.chunks) == NUM_REQUESTS
    drafted = {row.width for plan in watched.plans if plan.step_id >= 0 for row in plan.rows}
    assert max(drafted) > 1, "never tried"


def test_draft_time_of_a_chain_grows_with_its_width(pair: Path) -> None:
    """EAGLE-3 runs a pass per token; prompt lookup costs what it costs. Passes are counted, not timed."""
    ring, limits = build(pair, str(pair / "eagle3"))
    (drafter,) = ring.drafters
    assert isinstance(drafter, Eagle3Drafter)
    passes = []
    layer = drafter._layer.next_hidden
    drafter._layer.next_hidden = lambda *a: passes.append(1) or layer(*a)  # type: ignore[method-assign]
    for width in (2, 5, 16):
        passes.clear()
        answers(
            ring,
            limits,
            [GenerationRequest("a", [1, 2, 3], width + 2, policy=f"static:{width}")],
            cohorts=(1,),
        )
        assert len(passes) >= width - 1


def test_pairs_that_cannot_work_are_refused(pair: Path, tmp_path: Path) -> None:
    values = decoder_values(vocab_size=65)
    tensors = random_tensors(values, {"draft_vocab_size": 65})
    del tensors["d2t"], tensors["t2d"]
    taps = {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}
    save_public(tmp_path / "larger", {**values, "eagle_config": taps}, tensors)
    with pytest.raises(ConfigError, match="vocab_size is 64 in the target and 65"):
        build(pair, str(tmp_path / "larger"))
    values = decoder_values()
    save_public(tmp_path / "usual", values, random_tensors(values, {}))
    with pytest.raises(ConfigError, match=r"different layers, counted from 1: \[2, 3, 3\]"):
        build(pair, str(tmp_path / "usual"))  # six layers have no three usual ones


def test_kinds_are_told_by_their_configs(pair: Path) -> None:
    facts = draft_facts(load_drafter(spec_of(pair, "ngram")))
    assert (facts.config, facts.taps, facts.draft_block_size) == ({}, [], 16)
    facts = draft_facts(load_drafter(spec_of(pair, str(pair / "eagle3"))))
    assert facts.taps == [1, 2, 3] and facts.config["hidden_size"] == 32
    (drafter,) = build(pair, "ngram")[0].drafters
    assert isinstance(drafter, NgramDrafter)
    assert facts.config["vocab_size"] == VOCAB
