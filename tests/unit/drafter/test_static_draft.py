"""Passes over static memory, with padding, draft and ingest what packed passes do."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from device_waits import no_waiting
from drafter_helpers import (
    VOCAB,
    draft_config,
    make_engine,
    page_tables,
    random_weights,
    save_random_draft,
    verify_row,
)

from dflash_ops.context_attention import PlainContext
from dflash_ops.static_rows import BucketSizes
from dflash_wire.processors import DraftBias
from dflash_wire.records import Ingest, Row, RowExtras, StepPlan
from dflash_wire.sampling import SamplingParams
from drafter.checkpoint import load_draft_model
from drafter.engine import DrafterEngine
from drafter.network import DraftNetwork
from drafter.static_draft import why_not_static

pytestmark = pytest.mark.unit

SIZES = BucketSizes((1, 2, 4), (1, 4, 16), (2, 8), 64)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter")
    save_random_draft(folder, draft_config())
    return folder


def static_engine(path: Path, sizes: BucketSizes = SIZES) -> DrafterEngine:
    engine = make_engine(path, form=PlainContext())
    engine.use_static_passes(sizes, 0)
    return engine


def random_steps(seed: int, temperature: float) -> list[StepPlan]:
    """Sequences whose context grows while they draft, each step for some of them."""
    rng = random.Random(seed)
    tables = page_tables(3)
    cached, plans = [0, 0, 0], []
    for step in range(8):
        mine = rng.sample(range(3), rng.randint(1, 3))
        ingests, rows, offset = [], [], 0
        for i in mine:
            count = rng.randint(1, 3)
            ingests.append(Ingest(offset, count, cached[i], tables[i]))
            offset, cached[i] = offset + count, cached[i] + count
            sampling = SamplingParams(temperature=temperature * (i != 1), seed=i)
            width = rng.randint(2, 8)
            rows.append(verify_row(rng.randrange(VOCAB - 1), cached[i], tables[i], width, sampling))
        plans.append(StepPlan(step, rows, ingests))
    return plans


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("sizes", [SIZES, BucketSizes((4,), (8,), (8,), 64)])
def test_drafts_and_context_equal_those_of_packed_passes(
    path: Path, sizes: BucketSizes, temperature: float, seed: int
) -> None:
    packed, static = make_engine(path), static_engine(path, sizes)
    for plan in random_steps(seed, temperature):
        expected = packed.run(plan).draft_token_ids
        assert static.run(plan).draft_token_ids == expected
        torch.testing.assert_close(static.pool.data, packed.pool.data, atol=1e-5, rtol=1e-5)
    assert static.static is not None
    assert {isinstance(key[0], int) for key in static.static.passes.keys} == {True, False}


def test_causal_layers_draft_the_same(tmp_path: Path) -> None:
    save_random_draft(tmp_path, draft_config(dflash_config={"causal": True}))
    packed, static = make_engine(tmp_path), static_engine(tmp_path)
    for plan in random_steps(5, 1.0):
        assert static.run(plan).draft_token_ids == packed.run(plan).draft_token_ids


def test_rows_that_need_more_take_the_other_way(path: Path) -> None:
    engine = static_engine(path)
    assert engine.static is not None
    (pages,) = page_tables(1)
    tree = Row(0, [5], 0, pages, 4, draft_width=4, is_tree=True)
    biased = verify_row(5, 0, pages, 4)
    biased.extras = RowExtras(draft_bias=DraftBias([3], [1.0], []))
    cut = verify_row(5, 0, pages, 4, SamplingParams(temperature=1.0, top_k=3))
    for row in (tree, biased, cut, verify_row(5, 0, pages, 17)):
        engine.run(StepPlan(0, [row]))
    assert engine.static.passes.keys == []
    engine.run(StepPlan(0, [verify_row(5, 0, pages, 4)]))
    assert engine.static.passes.keys == [(1, 4, 2, False)]


def test_passes_never_wait_for_the_device(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = static_engine(path)
    static = engine.static
    assert static is not None
    tables = page_tables(2)
    samplings = [SamplingParams(temperature=1.0, seed=3), SamplingParams()]
    rows = [verify_row(5, 2, pages, 4, s) for pages, s in zip(tables, samplings, strict=True)]
    ingests = [Ingest(2 * i, 2, 0, pages) for i, pages in enumerate(tables)]
    bucket = static.bucket_of(rows)
    assert bucket is not None
    with torch.inference_mode():
        static.ingest(ingests)  # the first time things are made that stay
        static.launch(rows, bucket)
        with no_waiting(monkeypatch):
            assert static.ingest(ingests)
            drafts = static.launch(rows, bucket)
    assert drafts.shape == (2, 3)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, None),
        (
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention"] * 2,
            },
            "it has layers with a sliding window",
        ),
        (
            {
                "dflash_config": {
                    "conv_kernel_size": 2,
                    "conv_group_size": 8,
                    "selector_rank": 4,
                    "selector_top_k": 4,
                }
            },
            "DFlash 2 chooses slot by slot",
        ),
    ],
)
def test_which_drafters_have_static_passes(
    config: dict[str, object], reason: str | None, tmp_path: Path
) -> None:
    save_random_draft(tmp_path, draft_config(**config))  # type: ignore[arg-type]
    model = load_draft_model(tmp_path, torch.float32, "gathered_paged")
    assert why_not_static(DraftNetwork(model, random_weights())) == reason
