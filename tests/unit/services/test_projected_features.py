"""The drafter's first two operators on the verifier's side: narrower rows travel, nothing else changes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_helpers import HIDDEN, draft_config, save_random_draft
from local_engines import Collector, run
from tiny_models import save_target

from dflash_ops.attention import GATHERED
from dflash_ops.products import half_products_work
from dflash_ops.rotary import RotaryTables
from dflash_wire.errors import ConfigError
from dflash_wire.records import GenerationRequest, SamplingParams
from drafter.checkpoint import load_draft_model
from drafter.context import ContextProjection, FeatureProjection
from gateway.coordinator import Coordinator
from services.config import AppArgs
from services.local import build_local_ring
from services.spec import make_spec
from services.yaml_args import read_app_args

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("is_stored_in_16_bits", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_both_halves_are_the_whole_to_the_last_bit(
    tmp_path: Path, dtype: torch.dtype, is_stored_in_16_bits: bool
) -> None:
    """Weights that 16 bits hold are packed, and bring a factor along that the first half carries else."""
    save_random_draft(tmp_path, draft_config(3, 4, 2))
    model = load_draft_model(tmp_path, dtype, GATHERED)
    if is_stored_in_16_bits:
        # So small that half precision holds them only when scaled.
        for layer in model.layers:
            layer.self_attn.k_proj.weight.mul_(1e-3)
            layer.self_attn.v_proj.weight.mul_(1e-3)
        model = model.bfloat16().to(dtype)
    features = torch.randn(5, len(model.target_layer_ids) * HIDDEN).to(dtype)
    rotation = RotaryTables(model.rotary_emb, model.norm.weight).at([7, 8, 9, 3, 1500])
    whole = ContextProjection(model)(features, rotation)
    context = FeatureProjection(model)(features)
    assert context.shape == (5, HIDDEN)
    second = ContextProjection(model, is_projected=True)
    is_packed = is_stored_in_16_bits and dtype == torch.float32 and half_products_work()
    assert (second._kv_product.input_scale != 1.0) == is_packed
    assert torch.equal(second(context, rotation), whole)


def answers(projected_by: str) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Every request's chunks, drafts and acceptance included, and the FeaturePool's shape."""
    torch.set_num_threads(1)
    fields = read_app_args(ROOT / "config.yaml").model_dump(exclude_unset=True)
    fields["features"] = {"projected_by": projected_by}
    ring, limits = build_local_ring(make_spec(AppArgs.model_validate(fields)))
    sink, rng = Collector(), random.Random(2)
    coordinator = Coordinator(ring, sink, limits, "static:8", cohorts=(1,))
    requests = [
        GenerationRequest(
            f"r{i}",
            [rng.randrange(4, 900) for _ in range(30)],
            24,
            SamplingParams((0.0, 0.8)[i % 2], seed=i),
            policy=("static:8", "static-tree:16")[i // 2],
        )
        for i in range(4)
    ]
    run(coordinator, requests, per_step=2)
    told = {
        name: [(c.token_ids, c.cycle and c.cycle.num_accepted_drafts) for c in chunks]
        for name, chunks in sink.chunks.items()
    }
    return told, tuple(ring.verifier.feature_pool.shape)


def test_cycles_are_the_same_and_rows_narrower() -> None:
    """Drafts, and so what is accepted in every cycle: features that were wrong would change that alone."""
    by_drafter, wide = answers("drafter")
    by_verifier, narrow = answers("verifier")
    assert by_verifier == by_drafter
    assert sum(accepted or 0 for told in by_drafter.values() for _, accepted in told) > 20
    assert (wide[0], wide[1] % narrow[1]) == (narrow[0], 0) and wide[1] > narrow[1]


@pytest.mark.parametrize("model", [{"drafter": "none"}, {"drafter": "ngram"}])
def test_drafters_without_a_projection_are_refused(tmp_path: Path, model: dict[str, str]) -> None:
    save_target(tmp_path)
    fields = {
        "model": {"target": str(tmp_path), **model},
        "features": {"projected_by": "verifier"},
    }
    with pytest.raises(ConfigError, match="needs one drafter, a DFlash one"):
        make_spec(AppArgs.model_validate(fields))
