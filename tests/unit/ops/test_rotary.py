"""Rotation from tables against transformers' own, and growing tables."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from dflash_ops.rotary import FIRST_POSITIONS, RotaryTables

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@torch.inference_mode()
def test_equals_transformers(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    rotary = Qwen3RotaryEmbedding(Qwen3Config(head_dim=8, max_position_embeddings=64))
    positions = [0, 5, 4, 5, FIRST_POSITIONS - 1, FIRST_POSITIONS, 7 * FIRST_POSITIONS]
    x = torch.randn(len(positions), 3, 8, dtype=dtype)
    cos, sin = rotary(x[None], torch.tensor(positions)[None])
    heads_first = x.transpose(0, 1)[None]
    expected, _ = apply_rotary_pos_emb(heads_first, heads_first, cos, sin)
    tables = RotaryTables(rotary, x)
    tables.at([3])
    rotation = tables.at(positions)
    actual = rotation.rotate(x)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected[0].transpose(0, 1), atol=tolerance, rtol=tolerance)
    assert torch.equal(rotation.pair[0], cos)
    assert torch.equal(rotation.pair[1], sin)
