"""What the target loader refuses, and that RoPE variants work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import generate_greedy, save_target
from verifier_harness import Harness

from dflash_wire.errors import ConfigError
from verifier.families import load_target_config
from verifier.target import TargetModel

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")


def change_config(path: Path, **values: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    save_target(path, num_layers=2)
    return path


@pytest.fixture
def path(saved: Path, tmp_path: Path) -> Path:
    """A copy of the config alone."""
    (tmp_path / "config.json").write_text((saved / "config.json").read_text())
    return tmp_path


def test_facts(saved: Path) -> None:
    target = TargetModel(str(saved), torch.float32, CPU)
    assert (target.num_layers, target.num_heads, target.num_kv_heads, target.head_dim) == (
        2,
        4,
        2,
        8,
    )
    assert (target.hidden_size, target.vocab_size, target.max_positions) == (32, 64, 512)
    assert not target.model.training


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot load a target model config"):
        load_target_config(str(tmp_path))


def test_missing_weights(path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot load the target model at"):
        TargetModel(str(path), torch.float32, CPU)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported; supported are qwen3, llama"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "but no sliding_window"),
        (
            {"layer_types": ["full_attention", "linear_attention"]},
            "'qwen3' has layers of types linear_attention, whose running state cannot take",
        ),
        (
            {"model_type": "qwen3_next", "layer_types": None},
            "'qwen3_next' has layers of types linear_attention",
        ),
        (
            {"model_type": "gemma3_text", "attn_logit_softcapping": 30.0},
            "'attn_logit_softcapping' is not supported",
        ),
        (
            {
                "model_type": "gemma3_text",
                "sliding_window": 8,
                "use_bidirectional_attention": True,
            },
            "use_bidirectional_attention",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope type 'dynamic'",
        ),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantised by 'awq'"),
    ],
)
def test_unsupported(path: Path, values: dict[str, Any], message: str) -> None:
    change_config(path, **values)
    with pytest.raises(ConfigError, match=message):
        load_target_config(str(path))


def test_llama3_rope(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    model = save_target(tmp_path, "llama", rope_parameters=rope)
    harness = Harness(tmp_path, [0])
    lane = harness.lane([5, 9, 1, 40])
    harness.prefill(lane)
    harness.decode(lane, 15)
    assert lane.token_ids[4:] == generate_greedy(model, [5, 9, 1, 40], 16)
