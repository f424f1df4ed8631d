"""The drafter spares drafts that a bias or a list of allowed tokens would have rejected."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafter_helpers import (
    MASK_ID,
    draft_config,
    ingest_plan,
    make_engine,
    page_tables,
    save_random_draft,
    verify_row,
)

from dflash_wire.processors import DraftBias, Processors, RowExtras
from dflash_wire.records import Row, StepPlan
from dflash_wire.sampling import SamplingParams
from drafter.engine import DrafterEngine

pytestmark = pytest.mark.unit


@pytest.fixture
def engine(tmp_path: Path) -> DrafterEngine:
    save_random_draft(tmp_path, draft_config())
    return make_engine(tmp_path)


def drafted(
    engine: DrafterEngine, rows: list[Row]
) -> tuple[list[list[int]], list[list[int]] | None]:
    for row in rows:
        engine.run(ingest_plan(1, row.start_position, 0, row.page_ids))
    result = engine.run(StepPlan(2, rows))
    return result.draft_token_ids, result.parents


@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_its_own_row_is_biased(
    engine: DrafterEngine, temperature: float, is_tree: bool
) -> None:
    tables = page_tables(4)
    sampling = SamplingParams(temperature, seed=4)
    rows = [
        replace(verify_row(7, 5, pages, 6, sampling), is_tree=is_tree and i % 2 == 0, draft_width=6)
        for i, pages in enumerate(tables)
    ]
    plain, _ = drafted(engine, rows)
    (first, *_), unwanted = plain[0], sorted(set(plain[0]))
    biases = [
        DraftBias(unwanted, [-100.0] * len(unwanted), []),
        None,
        DraftBias([], [], [9, 11]),
        DraftBias([20], [100.0], [20, first]),
    ]
    asked = [
        replace(row, extras=RowExtras(draft_bias=bias))
        for row, bias in zip(rows, biases, strict=True)
    ]
    got, _ = drafted(engine, asked)
    assert got[0] and not set(got[0]) & set(unwanted)
    assert got[1] == plain[1]
    assert got[2] and set(got[2]) <= {9, 11}
    assert set(got[3]) == {20}


@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_no_token_is_left_any_draft_will_do(
    engine: DrafterEngine, temperature: float, is_tree: bool
) -> None:
    sampling = SamplingParams(temperature, 0.9, 5, seed=4)
    row = verify_row(7, 5, page_tables(1)[0], 4, sampling)
    bias = DraftBias([], [], [MASK_ID])
    row = replace(row, is_tree=is_tree, draft_width=4, extras=RowExtras(draft_bias=bias))
    (got,), _ = drafted(engine, [row])
    assert len(got) == (0 if is_tree else 3)
    assert torch.isfinite(engine.pool.data).all()


def test_few_tokens_are_told() -> None:
    assert Processors(presence_penalty=1.0).draft_bias is None
    biased = Processors(biased_token_ids=[3], biases=[1.5])
    assert biased.draft_bias == DraftBias([3], [1.5], [])
    assert Processors(allowed_token_ids=list(range(257))).draft_bias is None
