"""What executors are said to hold on a card, and when they are refused."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_target

from dflash_ops.paging import PagedPool
from dflash_wire.errors import ConfigError
from services.config import AppArgs
from services.drafter_kinds import DrafterKind
from services.engines import load_drafter, load_target, target_pool
from services.gpu_check.shapes import DRAFT_B16, QWEN3_8B
from services.memory_check import check_memory, drafter_plan, tensor_sizes, verifier_plan
from services.memory_plan import GIB, MemoryPlan, Part, Sizes, page_bytes, plan_verifier, together
from services.spec import DrafterSpec, EngineSpec, make_spec
from verifier.target import TargetModel

pytestmark = pytest.mark.unit

SIZES = Sizes("bfloat16", 4096, 16, 2048, 512, 2**31)


def test_pages_of_a_known_model() -> None:
    """2 x 8 heads x 128 x 36 layers x 2 bytes: 144 KiB for every token."""
    assert page_bytes(QWEN3_8B, SIZES) == 16 * 144 * 1024
    without_size = {k: v for k, v in QWEN3_8B.items() if k != "head_dim"}
    assert page_bytes(without_size, SIZES) == 16 * 144 * 1024


def plan(num_pages: int = 100) -> MemoryPlan:
    return MemoryPlan("verifier", (Part("weights", 10 * 2**30),), num_pages, 2**26)


def test_what_fits_is_taken_and_what_does_not_is_refused_with_numbers() -> None:
    plan().check(10 * 2**30 + 100 * 2**26, "on the card")
    with pytest.raises(ConfigError) as caught:
        plan().check(10 * 2**30 + 100 * 2**26 - 1, "on the card")
    assert str(caught.value) == (
        "verifier: 16.25 GiB are needed (weights 10.00, 100 pages 6.25), but on the card are 16.25 GiB; "
        "at most 99 pages (engine.num_pages) fit beside the rest"
    )


def test_where_no_pages_fit_the_card_is_too_small() -> None:
    with pytest.raises(ConfigError, match="no pages fit beside the rest: use a larger card"):
        plan().check(9 * 2**30, "on the card")


def test_executors_on_one_card_add_up() -> None:
    other = MemoryPlan("drafter", (Part("weights", 2**30),), 100, 2**24)
    both = together([plan(), other])
    assert both.num_bytes == plan().num_bytes + other.num_bytes
    assert [part.name for part in both.fixed] == ["verifier's weights", "drafter's weights"]
    assert both.most_pages(11 * 2**30 + 7 * (2**26 + 2**24)) == 7
    assert together([other]) is other


def test_eight_billion_parameters_need_what_is_known_of_them() -> None:
    needed = plan_verifier(QWEN3_8B, int(16.4e9), 5 * 4096, SIZES)
    parts = {part.name: part.num_bytes / GIB for part in needed.parts}
    assert parts["4096 pages"] == pytest.approx(9.0)
    assert parts["weights"] == pytest.approx(15.3, abs=0.1)
    assert parts["features"] == pytest.approx(2 * 2048 * 5 * 4096 * 2 / GIB)
    assert 2 < parts["working memory about"] < 4


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Big models, as far as their files tell."""
    for name, config, tensors in (
        ("target", QWEN3_8B, {"model.embed_tokens.weight": [151936, 4096], "x": [2**31]}),
        ("drafter", DRAFT_B16, {"fc.weight": [4096, 20480]}),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_zeros(folder / "model.safetensors", tensors)
    return tmp_path


def save_zeros(file: Path, shapes: dict[str, list[int]]) -> None:
    """A safetensors file of bfloat16 zeros that takes no room on the disk."""
    header: dict[str, Any] = {"__metadata__": {}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(file, 8 + len(text) + end)


def spec_of(pair: Path, **values: Any) -> EngineSpec:
    args = {
        "model": {
            "target": str(pair / "target"),
            "drafter": str(pair / "drafter"),
            "id": "big",
            "dtype": "bfloat16",
            "device": "cuda",
        },
        "engine": {"num_pages": 4096, "graph_memory_mib": 1024},
        "verifier": {"num_gpus": 0.7},
        "drafter": {"num_gpus": 0.3},
    }
    return replace(make_spec(AppArgs.model_validate(args)), **values)


def test_sizes_come_out_of_the_files(pair: Path) -> None:
    assert tensor_sizes(pair / "target")["x"] == 2**31
    spec = spec_of(pair)
    verifier, drafter = verifier_plan(spec), drafter_plan(spec, 0)
    assert drafter is not None
    assert verifier.fixed[0].num_bytes == 2 * (2**31 + 151936 * 4096)
    of_two = verifier_plan(replace(spec, num_ranks=2))
    assert of_two.fixed[0].num_bytes == 2 * (2**30 + 151936 * 4096)
    assert of_two.page_bytes == verifier.page_bytes // 2
    held = {part.name: part.num_bytes for part in drafter.fixed}
    assert held["the target's embedding and head"] == 2 * 151936 * 4096
    assert held["weights"] == 2 * 4096 * 20480 + drafter.page_bytes // 16 * 4096
    lanes = drafter_plan(replace(spec, num_lanes=3), 0)
    assert lanes is not None and lanes.page_bytes == 3 * drafter.page_bytes


def test_a_broken_file_is_named(pair: Path) -> None:
    (pair / "target" / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a safetensors file"):
        verifier_plan(spec_of(pair))


@pytest.mark.parametrize("header", [b"[]", b'{"x": 1}', b"[" * 10_000])
def test_what_is_no_safetensors_file_is_refused(pair: Path, header: bytes) -> None:
    file = pair / "target" / "model.safetensors"
    for length in (len(header), 2**63, 2**64 - 1):
        file.write_bytes(struct.pack("<Q", length) + header)
        with pytest.raises(ConfigError, match=r"model\.safetensors is not a safetensors file"):
            tensor_sizes(pair / "target")


def test_weights_that_are_there_twice_count_once(pair: Path) -> None:
    target = pair / "target"
    sizes = tensor_sizes(target)
    save_zeros(target / "consolidated.safetensors", {"layers.0": [2**33]})
    assert tensor_sizes(target) == sizes
    (target / "model.safetensors").rename(target / "model-00001-of-00001.safetensors")
    placed = dict.fromkeys(sizes, "model-00001-of-00001.safetensors")
    index = target / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": placed}))
    assert tensor_sizes(target) == sizes
    (target / "model-00001-of-00001.safetensors").unlink()
    with pytest.raises(ConfigError, match="model-00001-of-00001"):
        tensor_sizes(target)


def test_executors_are_refused_before_anything_is_loaded(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (12 * 2**30, 24 * 2**30))
    spec = spec_of(pair)
    for load in (load_target, load_drafter):
        with pytest.raises(
            ConfigError, match=r"verifier and drafter: .* on the card are 24\.00 GiB"
        ):
            load(spec)
    apart = replace(spec, placement="same_node")
    with pytest.raises(ConfigError, match=r"^verifier: .* free of the card's 24.00 GiB are 12.00"):
        load_target(apart)
    check_memory(apart, 0)  # the drafter alone finds room
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (139 * 2**30, 139 * 2**30))
    check_memory(spec)


def test_nothing_is_asked_of_what_needs_no_card(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    lookup = (DrafterSpec("default", "", DrafterKind.NGRAM),)
    check_memory(spec_of(pair, drafters=lookup, placement="same_node"), 0)
    check_memory(spec_of(pair, device="cpu"))


def test_a_pools_size_is_what_the_plan_says(tmp_path: Path) -> None:
    save_target(tmp_path)
    args = {
        "model": {"target": str(tmp_path), "drafter": "none", "id": "tiny"},
        "engine": {"policy": "off", "num_pages": 6, "kernel_folder": None},
    }
    spec = make_spec(AppArgs.model_validate(args))
    pool: PagedPool
    pool, _ = target_pool(spec, TargetModel(str(tmp_path), torch.float32, torch.device("cpu")))
    planned = verifier_plan(spec)
    assert planned.parts[-1] == Part("6 pages", pool.data.nbytes)
