"""Which targets ``engine.deterministic`` takes, and what it says to the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import HEAD_DIM, save_target

from dflash_ops import tokenwise
from dflash_wire.errors import ConfigError
from verifier import determinism
from verifier.determinism import check_deterministic
from verifier.target import TargetModel

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _small_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny targets' heads are smaller than any model's."""
    monkeypatch.setattr(determinism, "ALIGNED_DIMS", HEAD_DIM)


def load(path: Path, dtype: torch.dtype = torch.float32, **values: Any) -> TargetModel:
    model = save_target(path / "target", **values)
    model.to(torch.float16).to(torch.float32).save_pretrained(path / "target")
    return TargetModel(str(path / "target"), dtype, torch.device("cpu"))


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3"])
def test_dense_families_with_packed_weights(tmp_path: Path, family: str) -> None:
    check_deterministic(load(tmp_path, family=family))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_mixtures_of_experts_are_refused(tmp_path: Path, family: str) -> None:
    target = load(tmp_path, family=family)
    with pytest.raises(ConfigError, match=r"engine\.deterministic is not possible here: mixtures"):
        check_deterministic(target)


def test_dense_products_are_refused(tmp_path: Path) -> None:
    target = load(tmp_path, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="float32"):
        check_deterministic(target)


def test_heads_that_lie_differently_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load(tmp_path)
    monkeypatch.setattr(determinism, "ALIGNED_DIMS", tokenwise.ALIGNED_DIMS)
    with pytest.raises(ConfigError, match="heads of 8"):
        check_deterministic(target)
