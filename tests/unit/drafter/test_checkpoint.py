"""Both layouts: round trips, aliases, and every field that has to be translated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_helpers import HIDDEN, MASK_ID, VOCAB, draft_config, save_random_draft
from safetensors.torch import load_file, save_file

from dflash_ops.attention import GATHERED
from dflash_wire.errors import ConfigError
from drafter.checkpoint import (
    SPECULATORS,
    Z_LAB,
    build_model,
    load_draft_model,
    read_checkpoint,
    write_checkpoint,
)
from drafter.checkpoint.pairing import check_values, pair_values
from drafter.model import DraftModel

pytestmark = pytest.mark.unit

SLIDING = {
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 64,
    "use_sliding_window": True,
}
CONVOLUTION = {"conv_kernel_size": 3, "conv_group_size": 4}
SECOND = {**CONVOLUTION, "selector_rank": 6, "selector_top_k": 5}
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "sliding": ({"target_layer_ids": [7, 2, 4]}, SLIDING),
    "two-sided": ({}, {**SLIDING, "is_causal": False}),
    "narrow": ({"block_size": 6}, {"attention_bias": True}),
    "second": ({**SECOND, "block_size": 8}, {**SLIDING, "is_causal": False}),
    "yarn": (
        {},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0}},
    ),
}
ONLY_Z_LAB: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "scaled": ({"input_embedding_scale": 5.5, "output_multiplier": 0.5}, {}),
    "capped": ({"final_logit_softcapping": 20.0}, {}),
    "causal": ({}, {"is_causal": True}),
}


def saved(path: Path, shape: str) -> DraftModel:
    nested, top = {**SHAPES, **ONLY_Z_LAB}[shape]
    return save_random_draft(path, draft_config(dflash_config=nested, **top))


def change_config(path: Path, **values: Any) -> dict[str, Any]:
    file = path / "config.json"
    changed = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps(changed))
    return changed


def load(path: Path) -> DraftModel:
    return load_draft_model(path, torch.float32, GATHERED)


def assert_same_model(one: DraftModel, other: DraftModel, depth: bool = True) -> None:
    ours, theirs = one.settings, other.settings
    for name in ours.__slots__:
        if depth or name != "num_target_layers":
            assert getattr(ours, name) == getattr(theirs, name), name
    assert one.state_dict().keys() == other.state_dict().keys()
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    assert (one.mask_embedding is None) == (other.mask_embedding is None)
    if one.mask_embedding is not None and other.mask_embedding is not None:
        assert torch.equal(one.mask_embedding, other.mask_embedding)
    positions = torch.arange(600)[None]
    for mine, yours in zip(
        one.rotary_emb(torch.zeros(1), positions),
        other.rotary_emb(torch.zeros(1), positions),
        strict=True,
    ):
        assert torch.equal(mine, yours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, *ONLY_Z_LAB])
def test_z_lab_round_trip(tmp_path: Path, shape: str, dtype: torch.dtype) -> None:
    model = saved(tmp_path / "a", shape)
    assert_same_model(load(tmp_path / "a"), model)
    first = read_checkpoint(tmp_path / "a")
    first.tensors = {name: value.to(dtype) for name, value in first.tensors.items()}
    write_checkpoint(first, tmp_path / "b", Z_LAB)
    write_checkpoint(read_checkpoint(tmp_path / "b"), tmp_path / "c", Z_LAB)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()
    again = read_checkpoint(tmp_path / "c")
    assert {value.dtype for value in again.tensors.values()} == {dtype}
    assert again.values["dtype"] == str(dtype).removeprefix("torch.")
    assert_same_model(build_model(again, GATHERED, ""), build_model(first, GATHERED, ""))


@pytest.mark.parametrize("shape", SHAPES)
def test_speculators_round_trip(tmp_path: Path, shape: str) -> None:
    model = saved(tmp_path / "a", shape)
    write_checkpoint(read_checkpoint(tmp_path / "a"), tmp_path / "b", SPECULATORS)
    between = read_checkpoint(tmp_path / "b")
    assert between.layout == SPECULATORS
    assert_same_model(load(tmp_path / "b"), model, depth=False)
    write_checkpoint(between, tmp_path / "c", SPECULATORS)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()
    with pytest.raises(ConfigError, match="how many layers the target has"):
        write_checkpoint(between, tmp_path / "d", Z_LAB)
    between.values["num_target_layers"] = 12
    write_checkpoint(between, tmp_path / "d", Z_LAB)
    assert_same_model(load(tmp_path / "d"), model)


def test_fields_of_speculators(tmp_path: Path) -> None:
    saved(tmp_path / "a", "second")
    write_checkpoint(read_checkpoint(tmp_path / "a"), tmp_path / "b", SPECULATORS)
    values = json.loads((tmp_path / "b" / "config.json").read_text())
    decoder = values.pop("transformer_layer_config")
    assert values == {
        "architectures": ["DFlash2DraftModel"],
        "aux_hidden_state_layer_ids": [2, 10],
        "block_size": 8,
        "conv_group_size": 4,
        "conv_kernel_size": 3,
        "draft_vocab_size": VOCAB,
        "dtype": "float32",
        "mask_token_id": MASK_ID,
        "sample_from_anchor": False,
        "selector_rank": 6,
        "selector_top_k": 5,
        "sliding_window_non_causal": True,
        "speculators_config": {
            "algorithm": "dflash2",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
            "verifier": {"architectures": [], "name_or_path": None},
        },
        "speculators_model_type": "dflash2",
        "target_hidden_size": HIDDEN,
    }
    assert (decoder["model_type"], decoder["num_hidden_layers"]) == ("qwen3", 2)
    assert decoder["layer_types"] == SLIDING["layer_types"]
    assert (decoder["sliding_window"], decoder["use_sliding_window"]) == (64, True)
    saved(tmp_path / "c", "sliding")
    write_checkpoint(read_checkpoint(tmp_path / "c"), tmp_path / "d", SPECULATORS)
    values = json.loads((tmp_path / "d" / "config.json").read_text())
    assert values["architectures"] == ["DFlashSpeculator"]
    assert values["sliding_window_non_causal"] is False
    assert values["aux_hidden_state_layer_ids"] == [8, 3, 5]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("scaled", "cannot express input_embedding_scale 5.5"),
        ("capped", "cannot express final_logit_softcapping 20.0"),
        ("causal", "cannot express causal layers without a window"),
    ],
)
def test_what_speculators_cannot_express(tmp_path: Path, shape: str, message: str) -> None:
    saved(tmp_path / "a", shape)
    with pytest.raises(ConfigError, match=message):
        write_checkpoint(read_checkpoint(tmp_path / "a"), tmp_path / "b", SPECULATORS)
    assert not (tmp_path / "b").exists()


@pytest.fixture
def speculators(tmp_path: Path) -> Path:
    saved(tmp_path / "a", "plain")
    write_checkpoint(read_checkpoint(tmp_path / "a"), tmp_path / "b", SPECULATORS)
    return tmp_path / "b"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculators_model_type": "eagle3"}, "'eagle3'; only dflash, dflash2"),
        ({"sample_from_anchor": True}, "'sample_from_anchor' is not supported yet"),
        ({"aux_hidden_state_layer_ids": None}, "no aux_hidden_state_layer_ids"),
        ({"aux_hidden_state_layer_ids": [0, 3]}, "hidden state 0 is the embedding"),
        ({"transformer_layer_config": {"model_type": "llama"}}, "'llama'; draft layers must"),
        ({"transformer_layer_config": {"swish": 1}}, "not known here: swish"),
        ({"transformer_layer_config": None}, "no transformer_layer_config"),
        ({"conv_kernel_size": 2}, "not known here: conv_kernel_size"),
        ({"markov_rank": 256}, "not known here: markov_rank"),
        ({"target_hidden_size": 64}, "target_hidden_size is 64 but hidden_size is 32"),
        ({"speculators_config": {"algorithm": "dspark"}}, "the algorithm is 'dspark'"),
        ({"mask_token_id": None}, "mask_token_id"),
        ({"draft_vocab_size": 40}, "missing tensors"),
    ],
)
def test_speculators_that_are_refused(
    speculators: Path, change: dict[str, Any], message: str
) -> None:
    change_config(speculators, **change)
    with pytest.raises(ConfigError, match=message):
        load(speculators)


def test_defaults_of_speculators(speculators: Path) -> None:
    """Of keys that a file leaves out; a sliding layer's causality differs between the two kinds."""
    values = json.loads((speculators / "config.json").read_text())
    del values["block_size"], values["sliding_window_non_causal"], values["speculators_config"]
    (speculators / "config.json").write_text(json.dumps(values))
    assert load(speculators).draft_block_size == 8
    for kind, expected in (("dflash", None), ("dflash2", False)):
        change_config(speculators, speculators_model_type=kind)
        read = read_checkpoint(speculators).values
        assert read.get("is_causal") is expected
    assert [read["dflash_config"][key] for key in ("selector_rank", "selector_top_k")] == [256, 16]


def test_copies_of_the_target_are_left_out(speculators: Path) -> None:
    """Training keeps frozen copies; an embedding of its own is used instead of the target's."""
    file = speculators / "model.safetensors"
    tensors = load_file(file)
    save_file(
        {
            **tensors,
            "verifier_norm.weight": torch.ones(HIDDEN),
            "verifier_lm_head.weight": torch.zeros(VOCAB, HIDDEN),
            "embed_tokens.weight": torch.full((VOCAB, HIDDEN), 2.0),
            "rotary_emb.inv_freq": torch.zeros(4),
        },
        file,
    )
    model = load(speculators)
    assert model.embed_tokens is not None and model.lm_head is None
    assert (model.embed_tokens.weight == 2.0).all()


def test_aliases(tmp_path: Path) -> None:
    """Every alias at once, in two shards with an index."""
    model = saved(tmp_path, "second")
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    for layer in range(2):
        attention, mlp = f"layers.{layer}.self_attn.", f"layers.{layer}.mlp."
        parts = [tensors.pop(f"{attention}{n}_proj.weight") for n in "qkv"]
        tensors[f"{attention}qkv_proj.weight"] = torch.cat(parts)
        parts = [tensors.pop(f"{mlp}{n}_proj.weight") for n in ("gate", "up")]
        tensors[f"{mlp}gate_up_proj.weight"] = torch.cat(parts)
    aliased = {}
    for name, value in tensors.items():
        name = name.replace("layers.0.", "midlayer.").replace("fc.", "encoder.fc.", 1)
        name = name.replace("hidden_norm.", "encoder.output_norm_enc.")
        if name.endswith("codebook"):
            name += ".weight"
        aliased[f"model.{name}"] = value.clone()
    names = sorted(aliased)
    placed = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for part in set(placed.values()):
        save_file({n: aliased[n] for n in names if placed[n] == part}, tmp_path / part)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": placed}))
    save_file({"leftover": torch.zeros(1)}, tmp_path / "another.safetensors")
    assert_same_model(load(tmp_path), model)
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"files named by .* are missing: part-1"):
        load(tmp_path)
    index.write_text("{}")
    with pytest.raises(ConfigError, match=r"index\.json has no weight_map"):
        load(tmp_path)


def test_a_tensor_under_two_names(tmp_path: Path) -> None:
    saved(tmp_path, "plain")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({"encoder.fc.weight": tensors["fc.weight"]}, tmp_path / "more.safetensors")
    with pytest.raises(ConfigError, match=r"fc\.weight is stored twice"):
        load(tmp_path)
    save_file({"fc.weight": tensors["fc.weight"]}, tmp_path / "more.safetensors")
    with pytest.raises(ConfigError, match="tensors that another file has"):
        load(tmp_path)


def test_second_tensors_without_their_keys(tmp_path: Path) -> None:
    """A DFlash 2 file that is taken for DFlash runs, and drafts badly; here it does not run."""
    saved(tmp_path, "second")
    values = json.loads((tmp_path / "config.json").read_text())
    values["architectures"] = ["DFlashDraftModel"]
    assert load(tmp_path).candidate_selector is not None
    for key in SECOND:
        del values["dflash_config"][key]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"these are DFlash 2's, but config\.json lacks its keys"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"swizzle": 3}, r"config\.json has keys whose meaning is not known here: swizzle"),
        ({"quantization_config": {"bits": 4}}, "not known here: quantization_config"),
        ({"model_type": "llama"}, "model_type is 'llama'; draft layers must be 'qwen3'"),
        ({"dflash_config": {"mask_token_id": 3, "twirl": 1}}, "dflash_config has keys.*: twirl"),
        ({"num_hidden_layers": "two"}, "not a valid Qwen3 config"),
    ],
)
def test_unknown_keys(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    saved(tmp_path, "plain")
    change_config(tmp_path, **values)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_a_config_as_older_transformers_wrote_it(tmp_path: Path) -> None:
    model = saved(tmp_path, "yarn")
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    rope = values.pop("rope_parameters")
    values["rope_theta"] = rope.pop("rope_theta")
    values["rope_scaling"] = {**rope, "type": rope.pop("rope_type")}
    values |= {"torch_dtype": values.pop("dtype"), "auto_map": {"AutoModel": "dflash.Model"}}
    file.write_text(json.dumps({**values, "unknown_but_empty": None}))
    assert_same_model(load(tmp_path), model)


def test_mask_embedding(tmp_path: Path) -> None:
    saved(tmp_path / "a", "plain")
    embedding = torch.randn(HIDDEN)
    side = tmp_path / "a" / "mask_embedding.pt"
    torch.save({"embedding": embedding, "mask_token_id": MASK_ID, "per_position": False}, side)
    model = load(tmp_path / "a")
    assert model.mask_embedding is not None and torch.equal(model.mask_embedding, embedding)
    for layout in (Z_LAB, SPECULATORS):
        write_checkpoint(read_checkpoint(tmp_path / "a"), tmp_path / layout, layout)
        assert_same_model(load(tmp_path / layout), model, depth=layout == Z_LAB)
    write_checkpoint(read_checkpoint(tmp_path / "a"), tmp_path / "over", Z_LAB)
    (tmp_path / "over" / "model-2.safetensors").touch()
    with pytest.raises(ConfigError, match="has other weights, which would be read too"):
        write_checkpoint(read_checkpoint(tmp_path / "a"), tmp_path / "over", Z_LAB)
    (tmp_path / "over" / "model-2.safetensors").unlink()
    without = read_checkpoint(tmp_path / "a")
    without.mask_embedding = None
    write_checkpoint(without, tmp_path / "over", Z_LAB)
    assert load(tmp_path / "over").mask_embedding is None
    for broken, message in (
        ({"embedding": embedding, "per_position": True}, "per position"),
        ({"embedding": embedding, "mask_token_id": 5}, "is for mask_token_id 5, but .* says 63"),
        ({"embedding": torch.zeros(7)}, r"shape \[7\] but hidden_size is 32"),
        ({"other": 1}, "no tensor 'embedding'"),
    ):
        torch.save(broken, side)
        with pytest.raises(ConfigError, match=message):
            load(tmp_path / "a")
    side.write_bytes(b"no such thing")
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path / "a")


def test_both_values_are_named(tmp_path: Path) -> None:
    drafter = pair_values(saved(tmp_path, "plain"))
    assert drafter == {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_target_layers": 12}
    check_values(drafter, drafter, [1, 10])
    for name, other, message in (
        ("hidden_size", 64, "hidden_size is 64 in the target and 32 in the drafter"),
        ("vocab_size", 65, "vocab_size is 65 in the target and 64 in the drafter"),
        ("num_target_layers", 13, "num_target_layers is 13 in the target and 12 in the drafter"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_values(drafter, {**drafter, name: other}, [1])
    with pytest.raises(ConfigError, match=r"taps layer 11, but .* last tappable layer is 10"):
        check_values(drafter, drafter, [1, 11])
    del drafter["num_target_layers"]
    target = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_target_layers": 10}
    check_values(drafter, target, [8])
    with pytest.raises(ConfigError, match="last tappable layer is 8"):
        check_values(drafter, target, [9])
