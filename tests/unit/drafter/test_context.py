"""The joint projection against the model's own methods, which training uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_helpers import HIDDEN, draft_config, save_random_draft

from dflash_ops.attention import GATHERED
from dflash_ops.rotary import RotaryTables
from drafter.checkpoint import load_draft_model
from drafter.context import ContextProjection

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("is_stored_in_16_bits", [False, True])
@pytest.mark.parametrize("top", [{}, {"attention_bias": True}])
@pytest.mark.parametrize(("num_layers", "num_kv_heads"), [(1, 1), (2, 2), (5, 4)])
@torch.inference_mode()
def test_equals_the_model(
    tmp_path: Path,
    num_layers: int,
    num_kv_heads: int,
    top: dict[str, Any],
    is_stored_in_16_bits: bool,
) -> None:
    save_random_draft(tmp_path, draft_config(num_layers, 4, num_kv_heads, **top))
    model = load_draft_model(tmp_path, torch.float32, GATHERED)
    if is_stored_in_16_bits:
        model = model.bfloat16().float()
    positions = [7, 8, 9, 3, 1500]
    features = torch.randn(len(positions), len(model.target_layer_ids) * HIDDEN)
    expected = model.context_kv(model.project(features), torch.tensor(positions))
    tables = RotaryTables(model.rotary_emb, model.norm.weight)
    actual = ContextProjection(model)(features, tables.at(positions))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
