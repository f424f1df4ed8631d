"""Tables that a drafter brings along count as if the target had them."""

from __future__ import annotations

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
from torch import Tensor

from dflash_wire.records import StepPlan
from drafter.borrowed import BorrowedWeights
from drafter.checkpoint import Z_LAB, read_checkpoint, write_checkpoint

pytestmark = pytest.mark.unit

OTHER = random_weights(seed=8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_random_draft(
        tmp_path / "plain", draft_config(dflash_config={"input_embedding_scale": 2.0})
    )
    return tmp_path / "plain"


def logits_of(
    path: Path, borrowed: BorrowedWeights, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], Tensor]:
    engine = make_engine(path, borrowed)
    (pages,) = page_tables(1)
    engine.run(ingest_plan(0, 8, 0, pages))
    row = verify_row(5, 8, pages, 8)
    (drafts,), logits = run_with_logits(engine, StepPlan(1, [row]), monkeypatch)
    return drafts, logits


@pytest.mark.parametrize("table", ["mask embedding", "embedding", "head"])
def test_as_if_they_were_the_targets(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    checkpoint, target = read_checkpoint(path), random_weights()
    expected = BorrowedWeights(target.embedding.clone(), target.head)
    if table == "mask embedding":
        checkpoint.mask_embedding = torch.randn(HIDDEN)
        expected.embedding[MASK_ID] = checkpoint.mask_embedding
    elif table == "embedding":
        checkpoint.tensors["embed_tokens.weight"] = OTHER.embedding
        expected = BorrowedWeights(OTHER.embedding, target.head)
    else:
        checkpoint.tensors["lm_head.weight"] = OTHER.head
        expected = BorrowedWeights(target.embedding, OTHER.head)
    write_checkpoint(checkpoint, tmp_path / "own", Z_LAB)
    without, _ = logits_of(path, target, monkeypatch)
    drafts, logits = logits_of(tmp_path / "own", target, monkeypatch)
    same, whole = logits_of(path, expected, monkeypatch)
    assert drafts == same != without
    assert logits.shape == (7, VOCAB)
    torch.testing.assert_close(logits, whole)
    untouched = random_weights()
    assert torch.equal(target.embedding, untouched.embedding)
    assert torch.equal(target.head, untouched.head)
