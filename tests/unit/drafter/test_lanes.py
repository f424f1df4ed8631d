"""One drafter for several lanes, and several drafters behind one feature pool."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drafter_helpers import (
    HIDDEN,
    PAGE_SIZE,
    draft_config,
    make_engine,
    page_tables,
    save_random_draft,
    verify_row,
)

from dflash_wire.records import Ingest, StepPlan
from dflash_wire.sampling import SamplingParams
from drafter.engine import DrafterEngine

pytestmark = pytest.mark.unit

NUM_PAGES = 32


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter")
    save_random_draft(folder, draft_config(num_layers=2))
    return folder


def plans() -> list[StepPlan]:
    """One step per lane, with the same page ids in both."""
    first, second = page_tables(2)
    sampling = SamplingParams(temperature=0.7, seed=3)
    return [
        StepPlan(
            5,
            [verify_row(4, 9, first, 4), verify_row(7, 3, second, 6, sampling)],
            [Ingest(2, 9, 0, first), Ingest(30, 3, 0, second)],
        ),
        StepPlan(8, [verify_row(9, 7, first, 3, sampling)], [Ingest(11, 7, 0, first)]),
    ]


def lane_pages(engine: DrafterEngine, lane: int) -> torch.Tensor:
    num_slots = NUM_PAGES * PAGE_SIZE
    return engine.pool.data[:, lane * num_slots : (lane + 1) * num_slots]


def test_lanes_in_one_pass_get_what_each_gets_alone(path: Path) -> None:
    shared = make_engine(path, num_lanes=2)
    steps = list(enumerate(plans()))
    alone = []
    for lane, plan in steps:
        engine = make_engine(path)
        engine.feature_pools[0] = shared.feature_pools[lane]
        engine.pool.data.copy_(lane_pages(shared, lane))
        alone.append((engine.run(plan), engine.pool.data))
    together = shared.run_together(steps)
    for lane, (result, pool) in enumerate(alone):
        assert together[lane].step_id == result.step_id
        assert together[lane].draft_token_ids == result.draft_token_ids
        torch.testing.assert_close(lane_pages(shared, lane), pool, rtol=1e-5, atol=1e-5)
    assert together[0].draft_ms == together[1].draft_ms > 0


def test_a_step_of_one_lane_leaves_the_others_alone(path: Path) -> None:
    engine = make_engine(path, num_lanes=2)
    before = engine.pool.data.clone()
    engine.run_together([(1, plans()[0])])
    num_slots = NUM_PAGES * PAGE_SIZE
    assert torch.equal(engine.pool.data[:, :num_slots], before[:, :num_slots])
    assert not torch.equal(engine.pool.data[:, num_slots:], before[:, num_slots:])


def test_what_another_drafter_has_to_do_is_left_to_it(path: Path) -> None:
    """The plan of a step with work for two drafters goes to both."""
    (plan, _) = plans()
    plan.rows[0].drafter = plan.ingests[0].drafter = 1
    zeroth, first = make_engine(path), make_engine(path, index=1)
    before = zeroth.pool.data.clone()
    results = [engine.run(plan) for engine in (zeroth, first)]
    assert [[len(ids) for ids in r.draft_token_ids] for r in results] == [[0, 5], [3, 0]]
    written = [
        set((engine.pool.data != before).any(dim=(0, 2, 3, 4)).nonzero().flatten().tolist())
        for engine in (zeroth, first)
    ]
    slots = [zeroth.pool.slots(i.page_ids, 0, i.num_tokens).tolist() for i in plan.ingests]
    assert written == [set(slots[1]), set(slots[0])]
    merged = results[0].merged(results[1])
    assert merged.draft_token_ids == [results[1].draft_token_ids[0], results[0].draft_token_ids[1]]
    assert merged.draft_ms == results[0].draft_ms + results[1].draft_ms


@pytest.mark.parametrize("places", [[0, 1], [2, 0], [1, 3]])
def test_a_drafter_reads_its_own_layers_of_the_union(path: Path, places: list[int]) -> None:
    ours = make_engine(path)
    num_taps = len(ours.model.target_layer_ids)
    assert num_taps == 2
    union = make_engine(path, num_taps=4, taps=places)
    wide = union.feature_pools[0].view(-1, 4, HIDDEN)
    ours.feature_pools[0] = wide[:, places].flatten(1)
    (plan, _) = plans()
    assert union.run(plan).draft_token_ids == ours.run(plan).draft_token_ids
    assert torch.equal(union.pool.data, ours.pool.data)
