"""The draft checkpoint: round trip, refusals, and every way a folder can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dflash.model
import pytest
import torch
from drafter_helpers import MASK_ID, VOCAB, draft_config, save_random_draft
from safetensors.torch import load_file, save_file

from dflash_ops.attention import GATHERED, Visible
from dflash_wire.errors import ConfigError
from drafter.checkpoint import load_draft_model, save_draft_model
from drafter.model import DraftModel, default_target_layer_ids

pytestmark = pytest.mark.unit


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_random_draft(tmp_path, draft_config(num_layers=1))
    return tmp_path


def change_config(path: Path, **values: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def load(path: Path, dtype: torch.dtype = torch.float32) -> DraftModel:
    return load_draft_model(path, dtype, GATHERED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(tmp_path: Path, dtype: torch.dtype) -> None:
    nested = {"target_layer_ids": [4, 2], "input_embedding_scale": 3.0, "block_size": 8}
    saved = save_random_draft(tmp_path / "a", draft_config(dflash_config=nested))
    save_draft_model(load(tmp_path / "a", dtype), tmp_path / "b", dtype)
    loaded = load(tmp_path / "b")
    assert loaded.target_layer_ids == [4, 2]
    assert (loaded.draft_block_size, loaded.mask_token_id) == (8, MASK_ID)
    assert loaded.embedding_scale == 3.0
    assert loaded.config._attn_implementation == GATHERED
    assert not loaded.training
    for name, value in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.to(dtype).float()), name


def test_layout_is_z_labs(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    attention = [f"self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj", "o_proj")]
    norms = ["self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"]
    mlp = [f"mlp.{n}" for n in ("gate_proj", "up_proj", "down_proj")]
    expected = {f"layers.0.{name}.weight" for name in attention + norms + mlp}
    assert set(tensors) == expected | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"] == {"mask_token_id": MASK_ID, "target_layer_ids": [6]}
    assert (config["block_size"], config["dtype"]) == (16, "float32")


@pytest.mark.parametrize(
    ("target_layers", "draft_layers", "expected"),
    [(36, 5, [1, 9, 17, 25, 33]), (64, 5, [1, 16, 31, 46, 61]), (12, 1, [6]), (12, 2, [1, 9])],
)
def test_default_taps(target_layers: int, draft_layers: int, expected: list[int]) -> None:
    assert default_target_layer_ids(target_layers, draft_layers) == expected


def test_default_taps_equal_the_reference_package() -> None:
    for target_layers in range(6, 70):
        for draft_layers in range(1, 9):
            expected = dflash.model.build_target_layer_ids(target_layers, draft_layers)
            assert default_target_layer_ids(target_layers, draft_layers) == expected


def test_nested_keys_come_first() -> None:
    model = DraftModel(draft_config(dflash_config={"block_size": 10}, block_size=16))
    assert model.draft_block_size == 10
    assert DraftModel(draft_config(block_size=12)).draft_block_size == 12
    assert DraftModel(draft_config()).draft_block_size == 16


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_sink_bias", True),
        ("projector_type", "domino"),
        ("use_gemma_norm", True),
        ("attention_value_scale", 2.0),
        ("sample_from_anchor", True),
        ("rope_is_neox_style", False),
        ("use_aux_hidden_state", False),
    ],
)
def test_keys_that_change_semantics(key: str, value: Any, nested: bool) -> None:
    extra = {"dflash_config": {key: value}} if nested else {key: value}
    with pytest.raises(ConfigError, match=f"'{key}'.* not supported yet with value {value!r}"):
        DraftModel(draft_config(**extra))


def test_neutral_values_pass() -> None:
    neutral = {"output_multiplier": 1.0, "final_logit_softcapping": None, "causal": False}
    neutral |= {"sample_from_anchor": False, "rope_is_neox_style": True, "draft_vocab_size": VOCAB}
    settings = DraftModel(draft_config(dflash_config=neutral)).settings
    assert settings.is_plain
    assert (settings.output_multiplier, settings.logit_softcap) == (1.0, None)
    assert settings.draft_vocab_size is None


SLIDING = {"sliding_window": 64, "use_sliding_window": True}
MIXED = {**SLIDING, "layer_types": ["full_attention", "sliding_attention"]}
ALL, CAUSAL = Visible.ALL, Visible.CAUSAL


@pytest.mark.parametrize(
    ("nested", "top", "expected"),
    [
        ({}, {}, [(None, ALL), (None, ALL)]),
        ({}, MIXED, [(None, ALL), (64, CAUSAL)]),
        ({}, {**MIXED, "is_causal": False}, [(None, ALL), (64, ALL)]),
        ({"causal": True}, {**MIXED, "is_causal": False}, [(None, ALL), (64, ALL)]),
        ({"causal": True}, MIXED, [(None, CAUSAL), (64, CAUSAL)]),
        ({"causal": False}, MIXED, [(None, ALL), (64, ALL)]),
        ({}, {"is_causal": True}, [(None, CAUSAL), (None, CAUSAL)]),
        ({"use_swa": True, "swa_window_size": 9}, {}, [(9, CAUSAL), (9, CAUSAL)]),
        ({}, {**SLIDING, "max_window_layers": 1}, [(None, ALL), (64, CAUSAL)]),
    ],
)
def test_what_layers_see(
    nested: dict[str, Any], top: dict[str, Any], expected: list[tuple[int | None, Visible]]
) -> None:
    reaches = DraftModel(draft_config(dflash_config=nested, **top)).settings.reaches
    assert [(reach.window, reach.visible) for reach in reaches] == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**MIXED, "use_sliding_window": False}, "slide but there is no window"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"target_hidden_size": 48}, "target_hidden_size is 48 but hidden_size is 32"),
        ({"block_size": 1}, "block_size 1 leaves no room"),
        ({"conv_kernel_size": 2}, "conv_kernel_size 2, conv_group_size None"),
        ({"conv_kernel_size": 2, "conv_group_size": 5}, "conv_group_size 5 does not divide"),
        ({"selector_rank": 4, "selector_top_k": 65}, "selector_top_k 65 is larger"),
        ({"num_target_layers": None}, "neither target_layer_ids nor num_target_layers"),
        ({"dflash_config": {"target_layer_ids": [3, 3]}}, "must be different layers"),
        ({"dflash_config": {"target_layer_ids": [-1, 3]}}, "counted from 0"),
    ],
)
def test_values_that_contradict(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DraftModel(draft_config(**values))


ROPE = {"rope_theta": 500.0, "rope_type": "default"}


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({**ROPE, "rope_type": "dynamic", "factor": 2.0}, "rope type 'dynamic'.*who shares"),
        ({**ROPE, "rope_dim": 4}, "'rope_dim'"),
        (
            {**ROPE, "rope_type": "yarn", "factor": 2.0, "partial_rotary_factor": 0.5},
            "'partial_rotary_factor'",
        ),
        ({**ROPE, "twist": 1}, "twist"),
    ],
)
def test_ropes_that_are_not_implemented(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DraftModel(draft_config(rope_parameters=rope))


@pytest.mark.parametrize(
    "rope",
    [
        {**ROPE, "rope_dim": 8, "partial_rotary_factor": 1.0, "mrope_section": [1, 1, 2]},
        {**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {**ROPE, "rope_type": "linear", "factor": 2.0},
    ],
)
def test_ropes_that_are(rope: dict[str, Any]) -> None:
    DraftModel(draft_config(rope_parameters=rope))


@pytest.mark.parametrize(
    "values",
    [
        MIXED,
        {"output_multiplier": 0.5},
        {"final_logit_softcapping": 30.0},
        {"selector_rank": 4, "selector_top_k": 8},
        {"conv_kernel_size": 2, "conv_group_size": 8},
        {"has_own_lm_head": True},
    ],
)
def test_training_refuses_what_it_would_take_for_plain(values: dict[str, Any]) -> None:
    model = DraftModel(draft_config(**values))
    with pytest.raises(ConfigError, match="can be served, but not trained yet"):
        model(torch.zeros(1, 2, 32), torch.zeros(1, 2, dtype=torch.int64))


def test_mask_token_is_required() -> None:
    config = draft_config()
    config.dflash_config = {}
    with pytest.raises(ConfigError, match=r"no dflash_config\.mask_token_id"):
        DraftModel(config)
    config.dflash_config = {"mask_token": "<|MASK|>"}
    with pytest.raises(ConfigError, match=r"id of its mask_token '<\|MASK\|>'"):
        DraftModel(config)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        load(tmp_path / "nowhere")


def test_another_architecture(path: Path) -> None:
    change_config(path, architectures=["DSparkDraftModel"])
    with pytest.raises(ConfigError, match="expected \\['DFlashDraftModel'\\] or \\['DFlash2Dr"):
        load(path)
    change_config(path, architectures=["DFlash2DraftModel"])
    with pytest.raises(ConfigError, match="needs conv_kernel_size, conv_group_size, selector_rank"):
        load(path)


def test_no_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        load(path)


def change_tensors(path: Path, **changes: torch.Tensor | None) -> None:
    file = path / "model.safetensors"
    tensors = {**load_file(file), **changes}
    save_file({name: value for name, value in tensors.items() if value is not None}, file)


def test_missing_tensor(path: Path) -> None:
    change_tensors(path, **{"fc.weight": None})
    with pytest.raises(ConfigError, match=r"missing tensors \['fc\.weight'\]"):
        load(path)


def test_unexpected_tensor(path: Path) -> None:
    change_tensors(path, **{"head.weight": torch.zeros(2, 2)})
    with pytest.raises(ConfigError, match=r"unexpected tensors \['head\.weight'\]"):
        load(path)


def test_tensor_of_another_shape(path: Path) -> None:
    change_tensors(path, **{"norm.weight": torch.ones(7)})
    with pytest.raises(ConfigError, match=r"do not match config\.json"):
        load(path)


def test_shards_and_prefix(path: Path) -> None:
    """Checkpoints come in several files and with a ``model.`` prefix."""
    whole = load(path).state_dict()
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    for part, chosen in enumerate((names[:5], names[5:])):
        shard = {f"model.{name}": tensors[name] for name in chosen}
        save_file(shard, path / f"model-0000{part + 1}-of-00002.safetensors")
    loaded = load(path).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in whole.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_target_layers": None, "dflash_config": {"mask_token_id": 3}}, "num_target_layers"),
        ({"dflash_config": {"mask_token_id": 10**6}}, "outside the vocabulary"),
    ],
)
def test_a_config_that_would_fail_later_fails_at_start(
    path: Path, change: dict[str, Any], message: str
) -> None:
    change_config(path, **change)
    with pytest.raises(ConfigError, match=message):
        load(path)


def test_a_config_that_is_not_json_is_a_config_error(path: Path) -> None:
    (path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        load(path)
