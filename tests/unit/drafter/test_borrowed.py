"""Embedding and head come out of the target's checkpoint, however it is stored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from drafter_helpers import CPU
from safetensors.torch import load_file, save_file
from tiny_models import save_target

from dflash_wire.errors import ConfigError
from drafter.borrowed import EMBEDDING, HEAD, load_borrowed_weights

pytestmark = pytest.mark.unit


def drop(path: Path, *names: str) -> None:
    file = path / "model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if n not in names}, file)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_untied(tmp_path: Path, family: str) -> None:
    model = save_target(tmp_path, family, num_layers=1)
    borrowed = load_borrowed_weights(tmp_path, torch.float32, CPU)
    assert torch.equal(borrowed.embedding, model.model.embed_tokens.weight)
    assert torch.equal(borrowed.head, model.lm_head.weight)
    assert not torch.equal(borrowed.head, borrowed.embedding)


def test_tied(tmp_path: Path) -> None:
    model = save_target(tmp_path, num_layers=1, is_tied=True)
    assert HEAD not in load_file(tmp_path / "model.safetensors")
    borrowed = load_borrowed_weights(tmp_path, torch.float32, CPU)
    assert borrowed.head is borrowed.embedding
    assert torch.equal(borrowed.head, model.lm_head.weight)


def test_tied_with_a_stale_head_in_the_file(tmp_path: Path) -> None:
    """Some checkpoints carry both; transformers then uses the embedding, and so do we."""
    save_target(tmp_path, num_layers=1, is_tied=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, HEAD: torch.zeros_like(tensors[EMBEDDING])}, file)
    borrowed = load_borrowed_weights(tmp_path, torch.float32, CPU)
    assert borrowed.head is borrowed.embedding


def test_config_that_does_not_say(tmp_path: Path) -> None:
    model = save_target(tmp_path, num_layers=1)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    del values["tie_word_embeddings"]
    file.write_text(json.dumps(values))
    borrowed = load_borrowed_weights(tmp_path, torch.float32, CPU)
    assert torch.equal(borrowed.head, model.lm_head.weight)
    drop(tmp_path, HEAD)
    borrowed = load_borrowed_weights(tmp_path, torch.float32, CPU)
    assert borrowed.head is borrowed.embedding


def test_sharded(tmp_path: Path) -> None:
    model = save_target(tmp_path, num_layers=1)
    model.save_pretrained(tmp_path, max_shard_size="12KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    (tmp_path / "model.safetensors").unlink(missing_ok=True)
    borrowed = load_borrowed_weights(tmp_path, torch.float32, CPU)
    assert torch.equal(borrowed.embedding, model.model.embed_tokens.weight)
    assert torch.equal(borrowed.head, model.lm_head.weight)


@pytest.mark.parametrize(
    ("index", "message"),
    [("{", "is not JSON"), ("[]", "has no weight_map"), ('{"weight_map": 1}', "has no weight_map")],
)
def test_a_broken_index(tmp_path: Path, index: str, message: str) -> None:
    save_target(tmp_path, num_layers=1)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=rf"index\.json {message}"):
        load_borrowed_weights(tmp_path, torch.float32, CPU)


def test_cast(tmp_path: Path) -> None:
    save_target(tmp_path, num_layers=1)
    borrowed = load_borrowed_weights(tmp_path, torch.bfloat16, CPU)
    assert {borrowed.embedding.dtype, borrowed.head.dtype} == {torch.bfloat16}


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        load_borrowed_weights(tmp_path, torch.float32, CPU)


def test_no_embedding(tmp_path: Path) -> None:
    save_target(tmp_path, num_layers=1)
    drop(tmp_path, EMBEDDING)
    with pytest.raises(ConfigError, match=EMBEDDING):
        load_borrowed_weights(tmp_path, torch.float32, CPU)


def test_no_head_and_not_tied(tmp_path: Path) -> None:
    save_target(tmp_path, num_layers=1)
    drop(tmp_path, HEAD)
    with pytest.raises(ConfigError, match="does not tie its embeddings"):
        load_borrowed_weights(tmp_path, torch.float32, CPU)
