"""The norm against transformers' own."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from dflash_ops.norms import RootMeanSquareNorm

pytestmark = pytest.mark.unit


def make_module(size: int, dtype: torch.dtype) -> Qwen3RMSNorm:
    module = Qwen3RMSNorm(size, eps=1e-3)
    with torch.no_grad():
        module.weight.normal_(1.0, 0.3)
    return module.to(dtype)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@torch.inference_mode()
def test_equals_transformers(dtype: torch.dtype, tolerance: float, scale: float) -> None:
    """Also where epsilon decides, and in a type that takes torch's operator."""
    torch.manual_seed(0)
    module = make_module(24, dtype)
    x = (torch.randn(3, 5, 24) * scale).to(dtype)
    actual = RootMeanSquareNorm.of(module)(x)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, module(x), atol=tolerance, rtol=tolerance)


@torch.inference_mode()
def test_one_weight_per_head() -> None:
    torch.manual_seed(1)
    weight, x = torch.randn(4, 8), torch.randn(5, 4, 8)
    module = Qwen3RMSNorm(8, eps=1e-6)
    expected = module(x) * weight
    torch.testing.assert_close(RootMeanSquareNorm(weight, 1e-6)(x), expected)


@torch.inference_mode()
def test_zeros_stay_zero_and_the_factor_counts() -> None:
    module = make_module(8, torch.float32)
    assert torch.equal(RootMeanSquareNorm.of(module)(torch.zeros(2, 8)), torch.zeros(2, 8))
    x = torch.randn(2, 8)
    assert torch.equal(RootMeanSquareNorm.of(module, 0.25)(x), RootMeanSquareNorm.of(module)(x) / 4)
