"""Which form of attention a model's pool comes with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch

from dflash_ops.compiled_attention import RowKernel
from dflash_ops.kernel_build import find_compiler
from services.config import AppArgs
from services.engines import target_pool
from services.spec import make_spec
from verifier.target import TargetModel

pytestmark = pytest.mark.unit

FULL = {"layer_types": ["full_attention"]}


@pytest.mark.skipif(find_compiler() is None, reason="no C compiler here")
@pytest.mark.parametrize(
    ("family", "values", "is_compiled"),
    [("qwen3", {}, True), ("gemma3", {}, False), ("gpt_oss", {}, False), ("gpt_oss", FULL, False)],
)
def test_targets_with_windows_or_sinks_have_no_kernel(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    values: dict[str, Any],
    is_compiled: bool,
) -> None:
    monkeypatch.setattr(tiny_models, "HEAD_DIM", 16)  # a kernel's least
    path = tmp_path / "target"
    tiny_models.save_target(path, family, **values)
    args = {
        "model": {"target": str(path), "drafter": "none", "id": "tiny", "dtype": "float32"},
        "engine": {"policy": "off", "num_pages": 4, "kernel_folder": str(tmp_path / "kernels")},
    }
    spec = make_spec(AppArgs.model_validate(args))
    target = TargetModel(str(path), torch.float32, torch.device("cpu"))
    pool, form = target_pool(spec, target)
    assert pool.data.shape[-1] == 16
    assert isinstance(form, RowKernel) is is_compiled
    assert (tmp_path / "kernels").exists() is is_compiled
