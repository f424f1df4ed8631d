"""Trees of the embedded pair: the tokens of plain decoding, and more of them per cycle than a chain's."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from local_engines import END_OF_SEQUENCE, Collector, build_engines, encoded_prompts, run

from dflash_wire.ports import EngineLimits
from dflash_wire.records import GenerationRequest
from dflash_wire.sampling import SamplingParams
from dflash_wire.trees import NUM_SCORE_BINS
from gateway.coordinator import Coordinator, EngineSnapshot
from gateway.coordinator.block_scheduler.build import build_scheduler
from gateway.coordinator.block_scheduler.records import TREES as TREES_OF
from gateway.coordinator.block_scheduler.records import Decision, RowState, StepLoad, TreeShare
from gateway.coordinator.block_scheduler.scheduler import BlockScheduler
from services.local import LocalRing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_REQUESTS = 16
TREES = (4, 8, 16, 32, 64)
TEMPERATURES = (0.0, 0.7, 1.0)
PROCESSORS = ((1.0, 0), (0.9, 0), (1.0, 20), (0.95, 8))
"""top-p and top-k."""

Engines = tuple[LocalRing, EngineLimits]
Answers = dict[str, tuple[list[int], str | None]]


@pytest.fixture(scope="module")
def engines() -> Engines:
    return build_engines(num_pages=400, max_rows=8)


def requests(temperature: float) -> list[GenerationRequest]:
    prompts = encoded_prompts("word_problems,chat")[:NUM_REQUESTS]
    return [
        GenerationRequest(
            f"r{i}",
            prompt,
            30 + i,
            SamplingParams(temperature, *PROCESSORS[i % len(PROCESSORS)], 100 + i),
            [END_OF_SEQUENCE],
        )
        for i, prompt in enumerate(prompts)
    ]


def answers(
    engines: Engines, asked: list[GenerationRequest], policy: str, at_once: int
) -> tuple[Answers, EngineSnapshot]:
    ring, limits = engines
    sink = Collector()
    coordinator = Coordinator(ring, sink, replace(limits, max_rows=at_once), policy, cohorts=(1,))
    run(coordinator, asked, per_step=at_once)
    return {r.request_id: sink.answer(r.request_id) for r in asked}, coordinator.snapshot()


@pytest.fixture(scope="module")
def plain(engines: Engines) -> Iterator[dict[float, Answers]]:
    yield {t: answers(engines, requests(t), "off", 1)[0] for t in TEMPERATURES}


@pytest.mark.parametrize("at_once", [1, 8])
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("size", TREES)
def test_trees_equal_off(
    engines: Engines,
    plain: dict[float, Answers],
    size: int,
    temperature: float,
    at_once: int,
) -> None:
    got, now = answers(engines, requests(temperature), f"static-tree:{size}", at_once)
    assert got == plain[temperature]
    totals = now.totals
    assert totals.num_draft_tokens <= (size - 1) * totals.num_cycles
    assert totals.num_draft_tokens > 0.9 * (size - 1) * totals.num_cycles - size * NUM_REQUESTS


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_tree_commits_more_than_a_chain_of_as_many_positions(
    engines: Engines, temperature: float
) -> None:
    lengths = {}
    for policy in ("static:16", "static-tree:16"):
        totals = answers(engines, requests(temperature), policy, 8)[1].totals
        lengths[policy] = totals.num_cycle_tokens / totals.num_cycles
    assert lengths["static-tree:16"] > 1.1 * lengths["static:16"]


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_stop_tokens_inside_a_branch(
    engines: Engines, plain: dict[float, Answers], temperature: float
) -> None:
    """Every token of an answer in turn is a stop token, so some lie in the middle of what a tree commits."""
    first = requests(temperature)[2]
    tokens, _ = plain[temperature][first.request_id]
    asked = [
        replace(first, request_id=f"stop-{i}", stop_token_ids=[token])
        for i, token in enumerate(tokens)
    ]
    got, _ = answers(engines, asked, "static-tree:16", 8)
    for i, token in enumerate(tokens):
        assert got[f"stop-{i}"] == (tokens[: tokens.index(token) + 1], "stop")


class AnyShares(BlockScheduler):
    """Trees in every step that may have them, with budgets that change from step to step."""

    rng = random.Random(3)

    def decide(self, rows: Sequence[RowState], load: StepLoad) -> Decision:
        tree, block = None, self.rng.choice([4, 8, 16])
        if load.allows_trees:
            most = min(self.rng.choice([1, 5, 20, 60]), load.max_positions - len(rows))
            step_ms = [1.0, self.rng.choice([1.0, 1.5, 4.0])]
            maps = {
                row.traffic: np.exp(np.linspace(-8, 0, NUM_SCORE_BINS)).tolist() for row in rows
            }
            tree = TreeShare(TREES_OF + block, 20, [0, most], step_ms, maps, 1.0, 1.0)
        widths = [2 if tree else 1] * len(rows)
        return Decision(0, block if tree else 1, widths, 1.0, 1.0, "speculate", "any", tree)


@pytest.mark.parametrize("at_once", [1, 8])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_shared_nodes_equal_off(
    engines: Engines, plain: dict[float, Answers], temperature: float, at_once: int
) -> None:
    of = build_scheduler(16)
    scheduler = AnyShares(of.survival, of.cost, of.table)
    ring, limits = engines
    sink = Collector()
    coordinator = Coordinator(
        ring,
        sink,
        replace(limits, max_rows=at_once),
        "adaptive",
        cohorts=(1,),
        scheduler=scheduler,
    )
    asked = requests(temperature)
    run(coordinator, asked, per_step=at_once)
    assert {r.request_id: sink.answer(r.request_id) for r in asked} == plain[temperature]
    totals = coordinator.snapshot().totals
    assert totals.num_accepted_drafts > 0.5 * totals.num_cycles
