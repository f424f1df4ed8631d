"""EAGLE-3 drafts beside the model class of vLLM's speculators, on random weights."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_helpers import HIDDEN, VOCAB, page_tables, random_weights, verify_row
from eagle_helpers import (
    KEPT,
    decoder_values,
    make_eagle,
    random_tensors,
    save_public,
    save_speculators,
)
from safetensors.torch import load_file
from speculators_package import without_data_code
from torch import Tensor

from dflash_ops.sampling import choose_tokens
from dflash_wire.records import Ingest, StepPlan
from drafter.eagle3.engine import Eagle3Drafter

pytestmark = [
    pytest.mark.unit,
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"
    ),
]

SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any], list[int]]] = {
    "llama": ({}, {"norm_before_residual": False}, [1, 5, 8]),
    "qwen3": ({"kind": "qwen3"}, {"norm_before_residual": True}, [8, 2, 5]),
    "grouped": (
        {"num_attention_heads": 8, "num_key_value_heads": 1, "attention_bias": True},
        {"norm_before_residual": False, "norm_output": True},
        [1, 5, 8],
    ),
    "normed": ({}, {"norm_before_residual": True, "norm_before_fc": True}, [3, 4]),
    "normed each": ({"kind": "qwen3"}, {"norm_before_residual": False, "fc_norm": True}, [1, 5]),
    "trimmed": ({}, {"norm_before_residual": False, "draft_vocab_size": len(KEPT)}, [1, 5, 8]),
    "scaled rope": (
        {
            "rope_theta": 500.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
        {"norm_before_residual": True, "norm_output": True},
        [1, 5, 8],
    ),
}
SIZE = 6
"""Drafts per cycle."""


@pytest.fixture(scope="module")
def model_class() -> Any:
    """The package's class; two dependencies that only its data code imports are empty."""
    with without_data_code():
        from speculators.models.eagle3.core import Eagle3DraftModel

        yield Eagle3DraftModel


class Reference:
    """The package's model over our file."""

    def __init__(self, path: Path, model_class: Any) -> None:
        values = json.loads((path / "config.json").read_text())
        config = model_class.config_class(**values)
        config.transformer_layer_config._attn_implementation = "eager"
        self.model = model_class(config)
        missing, unexpected = self.model.load_state_dict(
            load_file(path / "model.safetensors"), strict=False
        )
        assert not unexpected
        assert set(missing) == {
            "embed_tokens.weight",
            "verifier_lm_head.weight",
            "verifier_norm.weight",
        }
        self.model.embed_tokens.weight.data.copy_(random_weights().embedding)
        self.model.eval()

    def logits(self, token_ids: Sequence[int], features: Tensor, drafts: list[int]) -> Tensor:
        """Logits ``[drafts, v]`` of a chain, each behind the drafts before it.

        Its training pass reads true tokens in place of drafts; given our drafts as such, it does what a
        chain does.

        Args:
            token_ids: committed tokens, the anchor last.
            features: of all of them but the anchor.
        """
        seen: list[Tensor] = []
        hook = self.model.lm_head.register_forward_hook(lambda _, __, out: seen.append(out[0]))
        known = [*token_ids, *drafts]
        padded = torch.cat([features, torch.zeros(len(drafts), features.shape[1])])
        self.model(
            padded[None],
            torch.tensor([[*known[1:], 0]])[:, : len(padded)],
            torch.zeros(1, len(padded), dtype=torch.int64),
            ttt_steps=len(drafts),
        )
        hook.remove()
        last = len(token_ids) - 2  # the place before the anchor
        return torch.stack([step[last] for step in seen])


def drafts_with_logits(
    engine: Eagle3Drafter, plan: StepPlan, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], Tensor]:
    seen: list[Tensor] = []

    def spy(logits: Tensor, runs: Any) -> Tensor:
        seen.append(logits.clone())
        return choose_tokens(logits, runs)

    monkeypatch.setattr("drafter.eagle3.engine.choose_tokens", spy)
    (drafts,) = engine.run(plan).draft_token_ids
    return drafts, torch.cat(seen)


@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_every_cycle_of_a_sequence(
    model_class: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    """Whatever was drafted and rejected before, a cycle starts from true features alone."""
    changes, own, taps = SHAPES[shape]
    values = decoder_values(**changes)
    tensors = random_tensors(values, own, len(taps))
    path = save_speculators(tmp_path / "theirs", values, own, tensors, taps)
    reference, engine = Reference(path, model_class), make_eagle(path, num_taps=len(taps))
    assert engine.model.target_layer_ids == taps
    rng = random.Random(4)
    (pages,) = page_tables(1)
    token_ids = [rng.randrange(VOCAB) for _ in range(9)]
    features = torch.randn(60, len(taps) * HIDDEN)
    num_ingested, spread = 0, []
    for cycle in range(5):
        ingests = []
        while num_ingested < len(token_ids) - 1:  # in pieces of any size
            end = min(len(token_ids) - 1, num_ingested + rng.randint(1, 4))
            engine.feature_pools[0][num_ingested:end] = features[num_ingested:end]
            ingest = Ingest(num_ingested, end - num_ingested, num_ingested, pages)
            ingest.token_ids = token_ids[num_ingested:end]
            ingests.append(ingest)
            num_ingested = end
            if rng.random() < 0.4:
                engine.run(StepPlan(cycle, [], ingests))
                ingests = []
        row = verify_row(token_ids[-1], len(token_ids) - 1, pages, SIZE + 1)
        drafts, actual = drafts_with_logits(engine, StepPlan(cycle, [row], ingests), monkeypatch)
        assert len(drafts) == SIZE
        expected = reference.logits(token_ids, features[: len(token_ids) - 1], drafts)
        kept = KEPT if shape == "trimmed" else torch.arange(VOCAB)
        torch.testing.assert_close(actual[:, kept], expected, atol=5e-5, rtol=1e-4)
        assert drafts == kept[expected.argmax(dim=1)].tolist()
        spread.append(float(expected.std()))
        token_ids += [*drafts[: rng.randint(0, 3)], rng.randrange(VOCAB)]  # some are accepted
    assert min(spread) > 0.3, "flat logits would prove little"


def test_the_public_layout_is_the_same_drafter(tmp_path: Path) -> None:
    own = {"draft_vocab_size": len(KEPT), "norm_before_residual": False}
    values = decoder_values()
    tensors = random_tensors(values, own)
    paths = [
        save_public(tmp_path / "a", {**values, "draft_vocab_size": len(KEPT)}, tensors),
        save_speculators(tmp_path / "b", values, own, tensors, taps=[1, 5, 8]),
    ]
    (pages,) = page_tables(1)
    ingest = Ingest(3, 7, 0, pages, token_ids=list(range(7)))
    found = []
    for path in paths:
        engine = make_eagle(path)
        assert engine.model.target_layer_ids == [1, 5, 8]  # of 12 layers
        found.append(engine.run(StepPlan(0, [verify_row(7, 7, pages, 9)], [ingest])))
    assert found[0].draft_token_ids == found[1].draft_token_ids
    assert set(found[0].draft_token_ids[0]) <= set(KEPT.tolist())
