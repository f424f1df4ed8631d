"""What every drafter promises, whatever it drafts with: the same tests for all kinds."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
from drafter_helpers import (
    NUM_TARGET_LAYERS,
    PAGE_SIZE,
    VOCAB,
    draft_config,
    make_engine,
    page_tables,
    save_random_draft,
)
from eagle_helpers import make_eagle, save_random_eagle

from dflash_wire.processors import DraftBias, RowExtras
from dflash_wire.proposals import unpacked_proposals
from dflash_wire.records import DraftResult, Ingest, Row, StepPlan
from dflash_wire.sampling import SamplingParams
from drafter.drafter import Drafter
from drafter.ngram import NgramDrafter, NgramSettings

pytestmark = pytest.mark.unit

NUM_PAGES = 32
SECOND = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
TEXT_LENGTH = 21


class Kind(NamedTuple):
    """One kind of drafter."""

    make: Callable[[int], Drafter]
    """A new one for so many lanes; all of a kind hold the same weights and the same features."""
    always_drafts: bool = True
    """Whether it drafts as many tokens as it is asked for."""


@pytest.fixture(scope="module", params=["dflash", "dflash2", "eagle3", "ngram"])
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    path = tmp_path_factory.mktemp("draft") / "model"
    name = request.param
    if name == "ngram":
        return Kind(
            lambda lanes: NgramDrafter(NgramSettings(), lanes * NUM_PAGES, PAGE_SIZE, lanes), False
        )
    if name == "eagle3":
        save_random_eagle(path)
        return Kind(lambda lanes: make_eagle(path, num_rows=128, num_lanes=lanes))
    nested = {"block_size": 16, "num_target_layers": NUM_TARGET_LAYERS}
    save_random_draft(
        path, draft_config(dflash_config=nested | (SECOND if name == "dflash2" else {}))
    )
    return Kind(lambda lanes: make_engine(path, num_rows=128, num_lanes=lanes))


def text(seed: int, length: int = TEXT_LENGTH) -> list[int]:
    """Committed tokens in which words come again, so that a look-up finds some."""
    rng = random.Random(seed)
    words = [[rng.randrange(VOCAB - 1) for _ in range(3)] for _ in range(3)]
    return [token for _ in range(length) for token in rng.choice(words)][:length]


def feed(tokens: list[int], pages: list[int], start: int, end: int, features: int = 0) -> Ingest:
    """Positions ``[start, end)`` of a sequence whose features are rows ``features`` and following."""
    return Ingest(features + start, end - start, start, pages, token_ids=tokens[start:end])


def whole(tokens: list[int], pages: list[int], features: int = 0) -> Ingest:
    """All but the anchor."""
    return feed(tokens, pages, 0, len(tokens) - 1, features)


def row_of(
    tokens: list[int], pages: list[int], width: int, sampling: SamplingParams | None = None
) -> Row:
    return Row(0, tokens[-1:], len(tokens) - 1, pages, width, sampling=sampling or SamplingParams())


def test_drafts_are_for_those_who_want_them(kind: Kind) -> None:
    drafter = kind.make(1)
    tables = page_tables(5)
    tokens = text(1)
    rows = [row_of(tokens, tables[0], width) for width in (1, 2, 9, 16)]
    rows.append(replace(row_of(tokens, tables[0], 5), drafter=1))
    rows.append(Row(9, [1, 2, 3], 0, tables[1], is_prefill=True))
    plan = StepPlan(
        7, rows, [whole(tokens, tables[0]), replace(whole(tokens, tables[2]), drafter=1)]
    )
    result = drafter.run(plan)
    assert result.step_id == 7 and result.draft_ms > 0 and result.began_s > 0
    assert (result.parents, result.scores, result.proposals) == (None, None, None)
    lengths = [len(drafts) for drafts in result.draft_token_ids]
    assert lengths == [0, 1, 8, 15, 0, 0]
    assert all(0 <= token < VOCAB for drafts in result.draft_token_ids for token in drafts)


def test_rows_of_a_step_are_drafted_as_each_alone(kind: Kind) -> None:
    drafter = kind.make(1)
    tables = page_tables(5)
    texts = [text(i, length) for i, length in enumerate((2, 5, 12, 17, 24))]
    samplings = [
        SamplingParams(),
        SamplingParams(0.8, 0.9, 0, 5),
        SamplingParams(1.0, 1.0, 4, 6),
        SamplingParams(),
        SamplingParams(1.2, 1.0, 0, 7),
    ]
    rows = [
        row_of(*pair, width, sampling)
        for *pair, width, sampling in zip(texts, tables, (5, 2, 8, 11, 16), samplings, strict=True)
    ]
    ingests = [
        whole(tokens, pages, 25 * i)
        for i, (tokens, pages) in enumerate(zip(texts, tables, strict=True))
    ]
    together = drafter.run(StepPlan(0, rows, ingests)).draft_token_ids
    alone = [drafter.run(StepPlan(1, [row])).draft_token_ids[0] for row in rows]
    assert together == alone
    assert any(together)


def test_pieces_and_pauses_do_not_matter(kind: Kind) -> None:
    """However positions were fed, and whatever was drafted and rejected in between."""
    tokens, (pages, others) = text(2), page_tables(2)
    row = row_of(tokens, pages, 9)
    expected = kind.make(1).run(StepPlan(0, [row], [whole(tokens, pages)])).draft_token_ids
    for seed in range(6):
        rng = random.Random(seed)
        drafter = kind.make(1)
        done, waiting = 0, list[Ingest]()
        while done < len(tokens) - 1:
            end = min(len(tokens) - 1, done + rng.randint(1, 6))
            waiting.append(feed(tokens, pages, done, end))
            done = end
            if rng.random() < 0.6:
                beside = [row_of(tokens[: done + 1], pages, rng.randint(2, 16))]
                other = text(seed + 50, 6)
                waiting.append(whole(other, others, 40))
                beside.append(row_of(other, others, 4))
                drafter.run(StepPlan(1, beside, waiting))
                waiting = []
        assert drafter.run(StepPlan(2, [row], waiting)).draft_token_ids == expected


def test_sequences_go_on_together(kind: Kind) -> None:
    """What each needs of the ingest before is its own."""
    tables = page_tables(4)
    texts = [text(i + 20, length) for i, length in enumerate((9, 15, 22, 12))]
    parts = list(enumerate(zip(texts, tables, (3, 8, 13, 5), strict=True)))
    rows = [row_of(tokens, pages, 7) for _, (tokens, pages, _) in parts]
    whole_texts = [whole(tokens, pages, 25 * i) for i, (tokens, pages, _) in parts]
    expected = kind.make(1).run(StepPlan(0, rows, whole_texts)).draft_token_ids
    drafter = kind.make(1)
    drafter.run(StepPlan(0, [], [feed(t, pages, 0, cut, 25 * i) for i, (t, pages, cut) in parts]))
    rest = [feed(t, pages, cut, len(t) - 1, 25 * i) for i, (t, pages, cut) in parts]
    assert drafter.run(StepPlan(1, rows, rest)).draft_token_ids == expected


def test_a_single_stride_of_plain_steps(kind: Kind) -> None:
    """Features of plain decoding lie apart (``Ingest.stride``)."""
    tokens, (pages,) = text(3), page_tables(1)
    drafter, plain = kind.make(1), kind.make(1)
    for pool in getattr(drafter, "feature_pools", []):
        pool[1 : 1 + 3 * TEXT_LENGTH : 3] = pool[:TEXT_LENGTH].clone()
    apart = Ingest(1, TEXT_LENGTH - 1, 0, pages, stride=3, token_ids=tokens[:-1])
    row = row_of(tokens, pages, 7)
    found = drafter.run(StepPlan(0, [row], [apart])).draft_token_ids
    assert found == plain.run(StepPlan(0, [row], [whole(tokens, pages)])).draft_token_ids


def test_full_pages_are_shared_whoever_filled_them(kind: Kind) -> None:
    """A sequence that begins as another did, and goes on as it did not: only the rest is fed."""
    first, (mine, rest) = text(4), page_tables(2)
    shared = 3 * PAGE_SIZE
    second = first[:shared] + [token ^ 1 for token in text(5)[shared:]]
    drafter, plain = kind.make(1), kind.make(1)
    drafter.run(StepPlan(0, [row_of(first, mine, 5)], [whole(first, mine)]))
    pages = mine[:3] + rest
    row = row_of(second, pages, 9)
    found = drafter.run(StepPlan(1, [row], [feed(second, pages, shared, TEXT_LENGTH - 1)]))
    expected = plain.run(StepPlan(1, [row], [whole(second, pages)]))
    assert found.draft_token_ids == expected.draft_token_ids


def test_pages_may_have_had_other_owners(kind: Kind) -> None:
    """After preemption, and in a replaced drafter: what is fed anew is all that counts."""
    tokens, (pages,) = text(6), page_tables(1)
    row = row_of(tokens, pages, 9)
    plan = StepPlan(1, [row], [whole(tokens, pages)])
    drafter = kind.make(1)
    expected = kind.make(1).run(plan).draft_token_ids
    other = text(7, 23)
    drafter.run(StepPlan(0, [row_of(other, pages, 16)], [whole(other, pages, 30)]))
    assert drafter.run(plan).draft_token_ids == expected
    moved = [31 - page for page in pages]
    again = StepPlan(2, [replace(row, page_ids=moved)], [whole(tokens, moved)])
    assert drafter.run(again).draft_token_ids == expected


def test_lanes_have_pages_of_their_own(kind: Kind) -> None:
    """Two lanes use the same page numbers in one pass."""
    together, alone = kind.make(2), kind.make(2)
    (pages,) = page_tables(1)
    texts = [text(8), text(9, 14)]
    plans = [
        StepPlan(i, [row_of(tokens, pages, 8)], [whole(tokens, pages)])
        for i, tokens in enumerate(texts)
    ]
    found = [r.draft_token_ids for r in together.run_together(list(enumerate(plans)))]
    assert found == [alone.run_together([step])[0].draft_token_ids for step in enumerate(plans)]
    assert found[0] != found[1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_have_paths_that_fit(kind: Kind, temperature: float) -> None:
    tokens, tables = text(10), page_tables(2)
    sampling = SamplingParams(temperature, seed=3)
    tree = replace(row_of(tokens, tables[0], 20, sampling), draft_width=6, is_tree=True)
    narrow = replace(tree, width=3)
    chain = row_of(tokens, tables[0], 6, sampling)
    plan = StepPlan(0, [tree, narrow, chain], [whole(tokens, tables[0])])
    result: DraftResult = kind.make(1).run(plan)
    assert result.parents is not None and result.scores is not None
    for row, drafts, parents in zip(plan.rows, result.draft_token_ids, result.parents, strict=True):
        assert 0 < len(drafts) < row.width
        assert row.is_tree or parents == []
        depths = [0]
        for node, parent in enumerate(parents):
            assert 0 <= parent <= node
            depths.append(depths[parent] + 1)
        assert max(depths) < row.drafted_width
    assert result.draft_token_ids[0][0] == result.draft_token_ids[2][0]


def test_sampled_drafts_come_with_their_distributions(kind: Kind) -> None:
    tokens, (pages,) = text(11), page_tables(1)
    row = row_of(tokens, pages, 6, SamplingParams(1.0, seed=4, rejects=True))
    greedy = row_of(tokens, pages, 6, SamplingParams(0.0, rejects=True))
    result = kind.make(1).run(StepPlan(0, [row, greedy], [whole(tokens, pages)]))
    assert result.proposals is not None
    drafts, proposals = result.draft_token_ids[0], unpacked_proposals(result.proposals[0])
    assert len(proposals) == len(drafts) == 5
    for draft, (token_ids, chances) in zip(drafts, proposals, strict=True):
        assert chances[token_ids.index(draft)] > 0  # type: ignore[attr-defined]
        assert sum(chances) == pytest.approx(1.0, abs=1e-4)
    assert (result.proposals[1], len(result.draft_token_ids[1])) == (b"", 5)


def test_forbidden_tokens_are_not_drafted(kind: Kind) -> None:
    tokens, (pages,) = text(12), page_tables(1)
    plan = StepPlan(0, [row_of(tokens, pages, 9)], [whole(tokens, pages)])
    drafter = kind.make(1)
    free = drafter.run(plan).draft_token_ids[0]
    allowed = [token for token in range(VOCAB - 1) if token != free[2]]
    plan.rows[0].extras = RowExtras(draft_bias=DraftBias([], [], allowed))
    kept = drafter.run(plan).draft_token_ids[0]
    assert set(kept) <= set(allowed)
    assert len(kept) == 8 if kind.always_drafts else kept == free[:2]
