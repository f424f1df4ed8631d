"""What we write in speculators' layout, loaded and run by speculators' own classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_helpers import (
    HIDDEN,
    VOCAB,
    draft_config,
    make_engine,
    page_tables,
    random_weights,
    run_with_logits,
    save_random_draft,
    verify_row,
)
from safetensors.torch import load_file
from speculators_package import without_data_code

from dflash_wire.records import Ingest, StepPlan
from drafter.checkpoint import SPECULATORS, read_checkpoint, write_checkpoint
from drafter.checkpoint.trim import trimmed

pytestmark = [
    pytest.mark.unit,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
]

CONTEXT = 11
SLIDING = {
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 64,  # wider than all there is: training counts it from the anchor
    "use_sliding_window": True,
}
SECOND = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
KEPT = torch.tensor([2, 3, 11, 17, 18, 40, 41, 62])
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"target_layer_ids": [5, 2, 9]}, {}),
    "causal": ({}, SLIDING),
    "two-sided": ({}, {**SLIDING, "is_causal": False}),
    "bias": ({}, {"attention_bias": True, "num_attention_heads": 6}),
    "trimmed": ({}, {}),
    "second": (SECOND, {**SLIDING, "is_causal": False}),
}


@pytest.fixture(scope="module")
def speculators() -> Any:
    """The package without its dependencies: two that only its data code imports are empty."""
    with without_data_code():
        from speculators.models.dflash import core as first
        from speculators.models.dflash2 import core as second

        yield {"dflash": first.DFlashDraftModel, "dflash2": second.DFlash2DraftModel}


def load_reference(path: Path, classes: dict[str, Any]) -> Any:
    """The package's model with our file's tensors; it may lack only what is the target's."""
    values = json.loads((path / "config.json").read_text())
    model_class = classes[values["speculators_model_type"]]
    config = model_class.config_class(**values)
    config.transformer_layer_config._attn_implementation = "eager"
    model = model_class(config)
    tensors = load_file(path / "model.safetensors")
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    borrowed = {"embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
    if "d2t" not in tensors:
        borrowed.add("lm_head.weight")
    assert set(missing) <= borrowed
    weights = random_weights()
    model.embed_tokens.weight.data.copy_(weights.embedding)
    if "d2t" not in tensors:
        model.lm_head.weight.data.copy_(weights.head)
    return model.eval()


@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_logits_of_a_block(
    speculators: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    nested, top = SHAPES[shape]
    save_random_draft(
        tmp_path / "a", draft_config(dflash_config={**nested, "block_size": 8}, **top)
    )
    checkpoint = read_checkpoint(tmp_path / "a")
    if shape == "trimmed":
        checkpoint = trimmed(checkpoint, KEPT)
        checkpoint.tensors["lm_head.weight"] = random_weights().head[KEPT]
    write_checkpoint(checkpoint, tmp_path / "b", SPECULATORS)
    theirs, ours = load_reference(tmp_path / "b", speculators), make_engine(tmp_path / "b")
    assert [tap - 1 for tap in theirs.target_layer_ids] == ours.model.target_layer_ids

    anchor, size = 7, 8
    features = torch.randn(CONTEXT + size + 1, theirs.fc.in_features)
    token_ids = torch.zeros(1, len(features), dtype=torch.int64)
    token_ids[0, CONTEXT] = anchor
    is_anchor = torch.zeros(1, len(features))
    is_anchor[0, CONTEXT] = 1
    hidden, logits, *_ = theirs._backbone_forward(
        features[None],
        token_ids,
        is_anchor,
        torch.zeros(1, len(features), HIDDEN),
        torch.zeros_like(token_ids),
        max_anchors=1,
    )
    (pages,) = page_tables(1)
    ours.feature_pools[0][:CONTEXT] = features[:CONTEXT]
    plan = StepPlan(0, [verify_row(anchor, CONTEXT, pages, size)], [Ingest(0, CONTEXT, 0, pages)])
    (drafts,), actual = run_with_logits(ours, plan, monkeypatch)
    expected = logits[0, 1:]
    kept = [i for i in range(VOCAB) if i != ours.model.mask_token_id]
    if shape == "trimmed":
        kept = (theirs.d2t + torch.arange(len(KEPT))).tolist()
        assert kept == theirs.t2d.nonzero()[:, 0].tolist() == KEPT.tolist()
        torch.testing.assert_close(actual[:, kept], expected, atol=3e-5, rtol=1e-5)
    elif shape == "second":
        expected[:, ours.model.mask_token_id] = -torch.inf
        before = torch.tensor([[anchor, *drafts[:-1]]])
        candidates, scores = theirs.candidate_selector.select(expected[None], hidden[:, 1:], before)
        found = actual.gather(1, candidates[0])
        torch.testing.assert_close(found, scores[0], atol=1e-4, rtol=1e-4)
        assert drafts == candidates[0].gather(1, scores[0].argmax(1, keepdim=True))[:, 0].tolist()
    else:
        torch.testing.assert_close(actual[:, kept], expected[:, kept], atol=3e-5, rtol=1e-5)
    assert expected[expected > -torch.inf].std() > 0.3, "flat logits would prove little"
