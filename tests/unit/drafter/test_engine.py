"""The drafter engine: what it reads, what it writes, and what it never drafts."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafter_helpers import (
    HIDDEN,
    MASK_ID,
    VOCAB,
    draft_config,
    ingest_plan,
    make_engine,
    page_tables,
    random_weights,
    run_with_logits,
    save_random_draft,
    verify_row,
)

from dflash_wire.records import Ingest, Row, StepPlan
from dflash_wire.sampling import SamplingParams
from dflash_wire.trees import unpacked_scores
from drafter.borrowed import BorrowedWeights
from drafter.engine import DrafterEngine
from drafter.tree import MOST_CANDIDATES

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter")
    save_random_draft(folder, draft_config(num_layers=2))
    return folder


@pytest.fixture
def engine(path: Path) -> DrafterEngine:
    return make_engine(path)


def test_plain_and_prefill_rows_get_nothing(engine: DrafterEngine) -> None:
    pages = page_tables(3)
    rows = [
        Row(0, [1, 2, 3], 0, pages[0], is_prefill=True),
        verify_row(4, 0, pages[1], 1),
        verify_row(5, 0, pages[2], 4),
    ]
    before = engine.pool.data.clone()
    result = engine.run(StepPlan(12, rows))
    assert result.step_id == 12
    assert [len(ids) for ids in result.draft_token_ids] == [0, 0, 3]
    assert result.parents is None
    assert torch.equal(engine.pool.data, before), "drafting must not write the context"
    assert engine.run(StepPlan(13, rows[:2])).draft_token_ids == [[], []]


def test_ingest_writes_its_positions_only(engine: DrafterEngine) -> None:
    pages, other = page_tables(2)
    before = engine.pool.data.clone()
    engine.run(StepPlan(0, [], [Ingest(2, 6, 3, pages), Ingest(20, 2, 0, other)]))
    written = torch.cat([engine.pool.slots(pages, 3, 9), engine.pool.slots(other, 0, 2)])
    untouched = [s for s in range(engine.pool.num_slots) if s not in written.tolist()]
    assert torch.equal(engine.pool.data[:, untouched], before[:, untouched])
    features = engine.feature_pools[0][[*range(2, 8), 20, 21]]
    positions = torch.tensor([*range(3, 9), 0, 1])
    with torch.inference_mode():
        expected = engine.model.context_kv(engine.model.project(features), positions)
    torch.testing.assert_close(engine.pool.data[:, written], expected, atol=1e-6, rtol=1e-6)


def test_split_ingests_equal_one(path: Path) -> None:
    """Features may come in any chunks, and one sequence's do not change another's."""
    whole, split = make_engine(path), make_engine(path)
    pages, other = page_tables(2)
    whole.run(ingest_plan(0, 11, 0, pages))
    split.run(ingest_plan(0, 4, 0, pages))
    split.run(StepPlan(1, [], [Ingest(30, 9, 0, other), Ingest(4, 6, 4, pages)]))
    split.run(ingest_plan(2, 1, 10, pages, offset=10))
    slots = whole.pool.slots(pages, 0, 11)
    torch.testing.assert_close(
        whole.pool.data[:, slots], split.pool.data[:, slots], atol=1e-6, rtol=1e-6
    )


def drafts_after(engine: DrafterEngine, dropped: int | None) -> list[list[int]]:
    """Drafts for ten anchors after ten positions of context, one of them perhaps without features."""
    (pages,) = page_tables(1)
    if dropped is not None:
        engine.feature_pools[0][dropped] = 0.0
    rows = [verify_row(anchor, 10, pages, 16) for anchor in range(0, 60, 6)]
    return engine.run(StepPlan(0, rows, [Ingest(0, 10, 0, pages)])).draft_token_ids


@pytest.mark.parametrize("dropped", range(10))
def test_every_feature_row_matters(path: Path, dropped: int) -> None:
    complete = drafts_after(make_engine(path), None)
    assert complete == drafts_after(make_engine(path), None)
    assert drafts_after(make_engine(path), dropped) != complete


def test_rows_of_mixed_widths_equal_each_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths, contexts (none included) and sampling parameters all differ in one pass."""
    engine = make_engine(path, num_rows=64)
    rng = random.Random(2)
    tables = page_tables(5)
    contexts, widths = [0, 3, 11, 3, 7], [5, 2, 8, 1, 16]
    samplings = [
        SamplingParams(),
        SamplingParams(0.8, 0.9, 0, 5),
        SamplingParams(1.0, 1.0, 4, 6),
        SamplingParams(),
        SamplingParams(1.2, 1.0, 0, 7),
    ]
    offsets = [sum(contexts[:i]) for i in range(5)]
    ingests = [
        Ingest(offset, count, 0, pages)
        for offset, count, pages in zip(offsets, contexts, tables, strict=True)
        if count
    ]
    engine.run(StepPlan(0, [], ingests))
    rows = [
        verify_row(rng.randrange(VOCAB), context, pages, width, sampling)
        for context, pages, width, sampling in zip(contexts, tables, widths, samplings, strict=True)
    ]
    together, logits = run_with_logits(engine, StepPlan(1, rows), monkeypatch)
    start = 0
    for i, row in enumerate(rows):
        if row.width == 1:
            assert together[i] == []
            continue
        alone, own = run_with_logits(engine, StepPlan(2, [row]), monkeypatch)
        assert together[i] == alone[0]
        torch.testing.assert_close(logits[start : start + row.width - 1], own, atol=1e-5, rtol=1e-5)
        start += row.width - 1
    assert start == logits.shape[0]


def test_trees_and_chains_in_one_pass_equal_each_alone(path: Path) -> None:
    """A tree's first node, and the first child of each, is what a chain drafts."""
    engine = make_engine(path)
    tables = page_tables(4)
    engine.run(StepPlan(0, [], [Ingest(8 * i, 6, 0, pages) for i, pages in enumerate(tables)]))
    samplings = [SamplingParams(), SamplingParams(1.0, seed=3), SamplingParams(), SamplingParams()]
    rows = [
        verify_row(3 + i, 6, pages, width, sampling)
        for i, (pages, width, sampling) in enumerate(
            zip(tables, (40, 5, 7, 12), samplings, strict=True)
        )
    ]
    for row, drafted in ((rows[0], 8), (rows[3], 2)):
        row.draft_width, row.is_tree = drafted, True
    prefill = Row(9, [1, 2], 0, [31], is_prefill=True)
    together = engine.run(StepPlan(1, [*rows, prefill]))
    assert together.parents is not None and together.scores is not None
    for i, row in enumerate(rows):
        alone = engine.run(StepPlan(2, [row]))
        assert together.draft_token_ids[i] == alone.draft_token_ids[0]
        if not row.is_tree:
            assert alone.parents is None and alone.scores is None
            assert (together.parents[i], together.scores[i]) == ([], b"")
            continue
        assert alone.parents == [together.parents[i]]
        assert unpacked_scores(together.scores[i]) == pytest.approx(
            unpacked_scores(alone.scores[0]),  # type: ignore[index]
            rel=0.01,
        )
        chain = engine.run(StepPlan(2, [replace(row, width=row.draft_width, is_tree=False)]))
        assert together.draft_token_ids[i][0] == chain.draft_token_ids[0][0]
        assert max(depths_of(together.parents[i])) < row.draft_width
    assert (together.draft_token_ids[4], together.parents[4]) == ([], [])
    assert len(together.parents[0]) == 39
    # One slot: siblings alone, as many as are looked at.
    assert together.parents[3] == [0] * MOST_CANDIDATES


def depths_of(parents: list[int]) -> list[int]:
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_mask_token_is_never_drafted(path: Path, temperature: float) -> None:
    """Not even by a head that wants nothing else."""
    torch.manual_seed(0)
    embedding, head = random_weights().embedding, torch.randn(VOCAB, HIDDEN) * 0.01
    (pages,) = page_tables(1)
    drafted = set()
    for sign in (1.0, -1.0):
        head[MASK_ID] = sign * 5.0
        engine = make_engine(path, BorrowedWeights(embedding, head))
        engine.run(ingest_plan(0, 5, 0, pages))
        for seed in range(20):
            row = verify_row(seed, 5, pages, 16, SamplingParams(temperature, seed=seed))
            drafted |= set(engine.run(StepPlan(1, [row])).draft_token_ids[0])
    assert drafted and MASK_ID not in drafted


def test_sampled_drafts_follow_the_seed(engine: DrafterEngine) -> None:
    (pages,) = page_tables(1)
    engine.run(ingest_plan(0, 6, 0, pages))

    def draft(seed: int) -> list[int]:
        row = verify_row(3, 6, pages, 16, SamplingParams(1.0, seed=seed))
        return engine.run(StepPlan(1, [row])).draft_token_ids[0]

    assert draft(1) == draft(1)
    assert len({tuple(draft(seed)) for seed in range(8)}) == 8


def test_sampled_drafts_use_the_positions_of_their_tokens(
    engine: DrafterEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The noise of draft ``j`` is that of the position the verifier will sample."""
    (pages,) = page_tables(1)
    engine.run(ingest_plan(0, 6, 0, pages))
    runs = []
    monkeypatch.setattr(
        "drafter.engine.choose_tokens",
        lambda logits, given: runs.extend(given) or logits.argmax(dim=-1),
    )
    engine.run(StepPlan(1, [verify_row(3, 6, pages, 4), verify_row(3, 2, pages, 3)]))
    assert [(run.start, run.end, run.first_position) for run in runs] == [(0, 3, 7), (3, 5, 3)]
