"""EAGLE-3 checkpoints: what loads, what is refused, and what ``inspect`` says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_helpers import HIDDEN, VOCAB
from eagle_helpers import KEPT, decoder_values, random_tensors, save_public, save_speculators

from dflash_wire.errors import ConfigError
from drafter.checkpoint.__main__ import main
from drafter.checkpoint.eagle3 import load_eagle3_model
from drafter.eagle3.model import Eagle3Model

pytestmark = pytest.mark.unit

TAPS = {"eagle_aux_hidden_state_layer_ids": [2, 6, 9]}


def load(path: Path, depth: int | None = 12) -> Eagle3Model:
    return load_eagle3_model(path, torch.float32, depth, 16)


def test_taps_are_named_or_usual(tmp_path: Path) -> None:
    values = decoder_values()
    tensors = random_tensors(values, {})
    plain = save_public(tmp_path / "plain", values, tensors)
    assert load(plain, 36).target_layer_ids == [1, 17, 32]
    with pytest.raises(ConfigError, match="name the target"):
        load(plain, None)
    for name, more in (("nested", {"eagle_config": TAPS}), ("top", TAPS)):
        path = save_public(tmp_path / name, {**values, **more}, tensors)
        assert load(path, None).target_layer_ids == [1, 5, 8]
    embedding = save_public(
        tmp_path / "zero", {**values, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, tensors
    )
    with pytest.raises(ConfigError, match=r"counted from 1: \[0, 1, 2\]"):
        load(embedding)


def test_names_that_files_use(tmp_path: Path) -> None:
    """``midlayer``, ``layers.0``, a prefix, fused products, an embedding, copies of the target's head."""
    values = decoder_values()
    tensors = random_tensors(values, {})
    expected = load(save_public(tmp_path / "plain", values, tensors)).state_dict()
    attention = "midlayer.self_attn."
    fused = {
        name: value
        for name, value in tensors.items()
        if not name.startswith(tuple(f"{attention}{part}_proj" for part in "qkv"))
    }
    parts = [tensors[f"{attention}{part}_proj.weight"] for part in "qkv"]
    fused[f"{attention}qkv_proj.weight"] = torch.cat(parts)
    renamed = {f"model.{k.replace('midlayer.', 'layers.0.')}": v for k, v in fused.items()}
    renamed["verifier_norm.weight"] = torch.ones(HIDDEN)
    renamed["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
    found = load(save_public(tmp_path / "other", values, renamed))
    assert found.embed_tokens is not None
    for name, value in expected.items():
        assert torch.equal(found.state_dict()[name], value)


def test_a_draft_vocabulary_of_all_tokens_is_none(tmp_path: Path) -> None:
    values = decoder_values(draft_vocab_size=VOCAB)
    tensors = random_tensors(values, {})
    tensors |= {
        "d2t": torch.zeros(VOCAB, dtype=torch.int64),
        "t2d": torch.ones(VOCAB, dtype=torch.bool),
    }
    assert load(save_public(tmp_path / "a", values, tensors)).draft_token_ids() is None
    tensors["d2t"][3] = 1
    with pytest.raises(ConfigError, match="d2t renames tokens"):
        load(save_public(tmp_path / "b", values, tensors))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({"model_type": "gemma3"}, "model_type is 'gemma3'"),
        ({"target_hidden_size": 64}, "target_hidden_size is 64 but hidden_size is 32"),
        ({"use_sliding_window": True, "sliding_window": 8}, "slide are not supported"),
        ({"some_new_key": 1}, "not known here: some_new_key"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "'use_mtp_layernorm' is not supported yet"),
        ({"eagle_config": {"other": 1}}, "not known here: other"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"draft_vocab_size": 8}, "tensors do not match"),
        ({"norm_before_fc": True}, r"missing tensors \['input_norm.weight'\]"),
        ({"intermediate_size": 41}, "tensors do not match"),
    ],
)
def test_what_is_not_understood_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    values = decoder_values()
    path = save_public(tmp_path / "a", {**values, **changes}, random_tensors(values, {}))
    with pytest.raises(ConfigError, match=message):
        load(path)


def test_configs_copied_from_a_target_pass(tmp_path: Path) -> None:
    """With windows that nobody uses, and nulls."""
    extra = {"max_window_layers": 36, "sliding_window": None, "use_sliding_window": False}
    values = decoder_values(**extra, bos_token_id=1, torch_dtype="bfloat16", rope_scaling=None)
    load(save_public(tmp_path / "a", values, random_tensors(values, {})))


@pytest.mark.parametrize("layout", ["EAGLE", "speculators"])
def test_inspect_tells_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    own = {"draft_vocab_size": len(KEPT), "norm_before_residual": True, "norm_output": True}
    values = decoder_values("qwen3")
    tensors = random_tensors(values, own)
    if layout == "EAGLE":
        path = save_public(tmp_path / "a", {**values, **own}, tensors)
    else:
        path = save_speculators(tmp_path / "a", values, own, tensors)
    target = tmp_path / "target"
    target.mkdir()
    shape = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": 12}
    (target / "config.json").write_text(json.dumps(shape))
    assert main(["inspect", str(path), "--target", str(target)]) == 0
    told = dict(
        line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line
    )
    told = {name: value.strip() for name, value in told.items()}
    assert (told["layout"], told["kind"], told["fits"]) == (layout, "EAGLE-3", str(target))
    assert told["tapped layers"] == "[1, 5, 8] of 12"
    assert told["head"] == "its own, 8 draft tokens"
    assert "in front of the residual; of what the next token" in told["further norms"]
    (target / "config.json").write_text(json.dumps({**shape, "hidden_size": 48}))
    assert main(["inspect", str(path), "--target", str(target)]) == 1
    assert "hidden_size is 48 in the target and 32" in capsys.readouterr().err


def test_only_dflash_is_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = decoder_values()
    path = save_public(tmp_path / "a", values, random_tensors(values, {}))
    assert main(["convert", str(path), str(tmp_path / "b"), "--layout", "z-lab"]) == 1
    assert "LlamaForCausalLMEagle3" in capsys.readouterr().err
