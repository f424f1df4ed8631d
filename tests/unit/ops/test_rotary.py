"""Rotation from tables against transformers' own, and growing tables."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma3TextConfig, GptOssConfig, Qwen3Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.gpt_oss import modeling_gpt_oss
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


@torch.inference_mode()
def test_kinds_of_layers_that_rotate_differently() -> None:
    config = Gemma3TextConfig(head_dim=8, num_hidden_layers=6)
    rotary = Gemma3RotaryEmbedding(config)
    x = torch.randn(3, 2, 8)
    positions = torch.tensor([4, 700, 31])
    rotated = []
    for kind in ("full_attention", "sliding_attention"):
        cos, sin = rotary(x[None], positions[None], kind)
        heads_first = x.transpose(0, 1)[None]
        expected, _ = apply_rotary_pos_emb(heads_first, heads_first, cos, sin)
        rotated.append(RotaryTables(rotary, x, kind).at(positions.tolist()).rotate(x))
        torch.testing.assert_close(rotated[-1], expected[0].transpose(0, 1), atol=1e-6, rtol=1e-6)
    assert not torch.equal(*rotated)


@torch.inference_mode()
def test_tables_of_one_half() -> None:
    """gpt-oss computes half of what the others do."""
    rotary = modeling_gpt_oss.GptOssRotaryEmbedding(GptOssConfig(head_dim=8))
    x = torch.randn(3, 2, 8)
    positions = torch.tensor([4, 700, 31])
    cos, sin = rotary(x[None], positions[None])
    heads_first = x.transpose(0, 1)[None]
    expected, _ = modeling_gpt_oss.apply_rotary_pos_emb(heads_first, heads_first, cos, sin)
    actual = RotaryTables(rotary, x).at(positions.tolist()).rotate(x)
    torch.testing.assert_close(actual, expected[0].transpose(0, 1), atol=1e-6, rtol=1e-6)
