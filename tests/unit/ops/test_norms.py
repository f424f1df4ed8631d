"""Fused norms compute what transformers' own do."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from dflash_ops.norms import fuse_rms_norms

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("cls", [LlamaRMSNorm, Qwen3RMSNorm])
def test_fused_norm_is_the_same_function(cls: type[nn.Module]) -> None:
    torch.manual_seed(0)
    norm = cls(24, eps=1e-3)
    nn.init.normal_(norm.weight)
    x = torch.randn(3, 5, 24) * 0.1  # small, so that a wrong epsilon shows
    expected = norm(x)
    assert fuse_rms_norms(nn.Sequential(nn.Linear(2, 2), norm)) == 1
    torch.testing.assert_close(norm(x), expected, atol=1e-6, rtol=1e-6)
    assert not torch.equal(norm(x), x)


def test_other_norms_are_left_alone() -> None:
    model = nn.Sequential(Qwen3RMSNorm(8).to(torch.bfloat16), nn.LayerNorm(8), nn.RMSNorm(8))
    assert fuse_rms_norms(model) == 0
