"""DFlash 2 against the public package: candidates, their distribution, and choices, cycle by cycle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dflash.model
import pytest
import torch
from drafter_helpers import (
    draft_config,
    make_engine,
    page_tables,
    random_weights,
    run_with_logits,
    save_random_draft,
    verify_row,
)
from torch import Tensor
from torch.nn.functional import embedding, linear
from transformers import DynamicCache

from dflash_wire.records import Ingest, StepPlan
from dflash_wire.sampling import SamplingParams
from drafter.engine import DrafterEngine

pytestmark = pytest.mark.unit

CYCLES = [(9, 6), (1, 6), (4, 3), (6, 7), (2, 2)]
SLIDING = {"sliding_window": 5, "use_sliding_window": True}
MIXED = ["full_attention", "sliding_attention"]


def second(taps: int, group: int, rank: int, top_k: int) -> dict[str, Any]:
    return {
        "conv_kernel_size": taps,
        "conv_group_size": group,
        "selector_rank": rank,
        "selector_top_k": top_k,
    }


def propose(
    theirs: Any,
    hidden: Tensor,
    anchor: int,
    head: Tensor,
    temperature: float,
    drafted: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[list[int], Tensor, Tensor | None]:
    """The reference's path, candidates and their distribution; its draws are replaced by ours."""
    logits = theirs.compute_logits(hidden, lambda x: linear(x, head))
    logits[:, theirs.mask_token_id] = -torch.inf
    draws = iter(enumerate(drafted))
    seen: list[Tensor] = []
    real_topk = torch.topk

    def topk(*args: Any, **kwargs: Any) -> Any:
        found = real_topk(*args, **kwargs)
        seen.append(found.indices[0])
        return found

    def same_draw(_: Tensor) -> Tensor:
        slot, token = next(draws)
        return (seen[0][slot] == token).nonzero()[0]

    with monkeypatch.context() as patch:
        patch.setattr(torch, "topk", topk)
        patch.setattr(dflash.model, "_sample_probs", same_draw)
        path, candidates, q = theirs.candidate_selector.select(
            hidden[None], logits[None], torch.tensor([anchor]), temperature
        )
    return path[0].tolist(), candidates[0], None if q is None else q[0]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    ("num_layers", "num_heads", "num_kv_heads", "nested", "top"),
    [
        (1, 4, 2, second(2, 8, 6, 5), {}),
        (2, 4, 1, second(2, 1, 4, 64), {}),
        (3, 6, 2, second(3, 16, 3, 2), {**SLIDING, "layer_types": [*MIXED, MIXED[1]]}),
        (
            5,
            4,
            4,
            second(2, 32, 8, 16),
            {**SLIDING, "layer_types": MIXED[1:] * 5, "is_causal": False},
        ),
        (2, 8, 1, {**second(3, 4, 5, 1), "output_multiplier": 0.5}, {"attention_bias": True}),
        (2, 4, 2, {**second(1, 8, 5, 8), "final_logit_softcapping": 2.0}, {}),
    ],
)
@torch.inference_mode()
def test_cycles(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    nested: dict[str, Any],
    top: dict[str, Any],
    temperature: float,
) -> None:
    config = draft_config(num_layers, num_heads, num_kv_heads, dflash_config=nested, **top)
    save_random_draft(tmp_path, config)
    theirs = dflash.model.DFlash2DraftModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ours = make_engine(tmp_path)
    weights = random_weights()
    cache = DynamicCache(config=theirs.config)
    cache.activate_past_recording()
    (pages,) = page_tables(1)
    features = torch.randn(sum(n for n, _ in CYCLES), theirs.fc.in_features)
    start = 0
    for cycle, (count, width) in enumerate(CYCLES):
        anchor = 7 * cycle + 1
        chunk = features[start : start + count]
        ids = torch.tensor([anchor] + [theirs.mask_token_id] * (width - 1))
        hidden = theirs(
            target_hidden=chunk[None],
            noise_embedding=embedding(ids, weights.embedding)[None],
            position_ids=torch.arange(start, start + count + width)[None],
            past_key_values=cache,
            use_cache=True,
        )[0]
        start += count
        cache.crop(start - cache.get_seq_length())
        ours.feature_pools[0][5 : 5 + count] = chunk
        row = verify_row(anchor, start, pages, width, SamplingParams(temperature, seed=3))
        ingest = Ingest(5, count, start - count, pages)
        plan = StepPlan(cycle, [row], [ingest])
        (drafts,), logits = run_with_logits(ours, plan, monkeypatch)
        path, candidates, q = propose(
            theirs, hidden[1:], anchor, weights.head, temperature, drafts, monkeypatch
        )
        assert drafts == path
        is_real = candidates != theirs.mask_token_id
        mine = logits.gather(1, candidates)
        assert (logits > -torch.inf).sum() == is_real.sum()
        if q is None:
            assert drafts == candidates.gather(1, mine.argmax(1, keepdim=True))[:, 0].tolist()
        else:
            torch.testing.assert_close((mine / temperature).softmax(1), q, atol=1e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> DrafterEngine:
    path = tmp_path_factory.mktemp("second")
    save_random_draft(path, draft_config(2, dflash_config=second(2, 8, 6, 5)))
    return make_engine(path)


def test_rows_of_one_pass_equal_each_alone(engine: DrafterEngine) -> None:
    """Convolutions do not cross rows, and every row walks from its own anchor; trees begin with the chain."""
    tables = page_tables(4)
    engine.run(StepPlan(0, [], [Ingest(9 * i, 7, 0, pages) for i, pages in enumerate(tables)]))
    samplings = [SamplingParams(), SamplingParams(0.8, 0.9, 3, 5), SamplingParams()]
    rows = [
        verify_row(5 * i + 1, 7, pages, width, sampling)
        for i, (pages, width, sampling) in enumerate(
            zip(tables, (6, 4, 12), samplings, strict=False)
        )
    ]
    rows[2].draft_width, rows[2].is_tree = 8, True
    together = engine.run(StepPlan(1, rows))
    for i, row in enumerate(rows):
        alone = engine.run(StepPlan(2, [row]))
        assert alone.draft_token_ids[0] == together.draft_token_ids[i]
    chain = verify_row(11, 7, tables[2], 8)
    (expected,) = engine.run(StepPlan(3, [chain])).draft_token_ids
    tree, parents = together.draft_token_ids[2], (together.parents or [])[2]
    path, node = [], 0
    while node in parents:
        node = parents.index(node) + 1
        path.append(tree[node - 1])
    assert path == expected[: len(path)] and path


def test_the_selector_changes_choices(
    engine: DrafterEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else all of the above would pass without it."""
    (pages,) = page_tables(1)
    row = verify_row(3, 0, pages, 16)
    with_selector = engine.run(StepPlan(0, [row])).draft_token_ids
    monkeypatch.setattr(engine.model, "candidate_selector", None)
    assert engine.run(StepPlan(1, [row])).draft_token_ids != with_selector
