"""The norm against transformers' own."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from dflash_ops.norms import RootMeanSquareNorm, norm_of

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


@pytest.mark.parametrize("kind", [Qwen3RMSNorm, GptOssRMSNorm, Gemma3RMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_families(kind: type[torch.nn.Module], dtype: torch.dtype) -> None:
    """In 16 bits the families round at different places; two of them exactly where transformers does."""
    torch.manual_seed(2)
    modules = [kind(24, eps=1e-3).to(dtype) for _ in range(2)]
    for module in modules:
        module.weight.normal_(0.4, 0.3)  # type: ignore[operator]
    x = torch.randn(5, 3, 24).to(dtype)
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    actual, expected = norm_of(modules[0])(x), modules[0](x)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
    if dtype == torch.bfloat16 and kind is not Qwen3RMSNorm:
        assert torch.equal(actual, expected)
    per_head = norm_of(modules[0], heads=[(modules[0], 2), (modules[1], 1)])(x)
    both = torch.cat([modules[0](x[:, :2]), modules[1](x[:, 2:])], dim=1)
    torch.testing.assert_close(per_head, both, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(norm_of(modules[0], 0.5)(x), actual / 2)
