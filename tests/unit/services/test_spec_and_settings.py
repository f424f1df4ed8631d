"""From arguments and the models' JSON files to plain settings."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from dflash_wire.drafters import DrafterLimits
from dflash_wire.errors import ConfigError
from gateway.state import SamplingDefaults
from services.config import AppArgs
from services.engines import engine_limits
from services.model_paths import resolve_model_path
from services.placement import FeatureRoute
from services.settings import gateway_settings
from services.spec import DrafterSpec, EngineSpec, make_spec

pytestmark = pytest.mark.unit

TARGET = {"max_position_embeddings": 4096, "vocab_size": 1000, "eos_token_id": 7}
DRAFT = {"block_size": 8, "dflash_config": {"mask_token_id": 999}}


def write(path: Path, name: str, values: dict[str, Any]) -> None:
    path.mkdir(exist_ok=True)
    (path / name).write_text(json.dumps(values))


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    write(tmp_path / "target", "config.json", TARGET)
    write(tmp_path / "drafter", "config.json", DRAFT)
    return tmp_path


def make_args(pair: Path, **sections: Any) -> AppArgs:
    model = {"target": str(pair / "target"), "drafter": str(pair / "drafter"), "id": "pair"}
    engine = {"policy": "static:8", **sections.pop("engine", {})}
    return AppArgs.model_validate(
        {"model": {**model, **sections.pop("model", {})}, "engine": engine, **sections}
    )


def test_spec_carries_every_argument(pair: Path) -> None:
    args = make_args(
        pair,
        model={"dtype": "bfloat16", "device": "cuda"},
        engine={
            "num_pages": 11,
            "page_size": 12,
            "max_step_positions": 113,
            "max_rows": 14,
            "max_context": 15,
            "kernel_folder": "/kernels",
        },
        verifier={"num_threads": 16},
        drafter={"num_threads": 17, "shared_by": 3},
        features={"projected_by": "verifier"},
        link={"kind": "tcp"},
        placement="spread",
    )
    spec = make_spec(args)
    assert spec == EngineSpec(
        target_path=str(pair / "target"),
        drafters=(DrafterSpec("default", str(pair / "drafter")),),
        num_lanes=3,
        kernel_folder="/kernels",
        dtype="bfloat16",
        device="cuda",
        num_pages=11,
        page_size=12,
        max_step_positions=113,
        max_rows=14,
        max_context=15,
        verifier_threads=16,
        drafter_threads=17,
        placement="spread",
        features=FeatureRoute("nixl", "pull"),
        projects_features=True,
    )
    assert pickle.loads(pickle.dumps(spec)) == spec


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ({"hidden_size": 65}, "hidden_size is 64 in the target and hidden_size is 65"),
        ({"vocab_size": 999}, "vocab_size is 1000 in the target and vocab_size is 999"),
        ({"num_target_layers": 5}, "num_hidden_layers is 4 .* num_target_layers is 5"),
        ({"dflash_config": None}, "holds no DFlash drafter"),
    ],
)
def test_pairs_that_cannot_work_are_refused_before_anything_starts(
    pair: Path, draft: dict[str, Any], message: str
) -> None:
    write(pair / "target", "config.json", {**TARGET, "hidden_size": 64, "num_hidden_layers": 4})
    values = {k: v for k, v in {**DRAFT, **draft}.items() if v is not None}
    write(pair / "drafter", "config.json", values)
    args = make_args(pair)
    with pytest.raises(ConfigError, match=message):
        gateway_settings(args, make_spec(args))


def test_a_default_policy_of_another_drafter_is_refused(pair: Path) -> None:
    args = make_args(pair, engine={"policy": "static:9"})
    with pytest.raises(ConfigError, match=r"engine\.policy.*from 2 to 8"):
        gateway_settings(args, make_spec(args))


def test_trees_are_as_large_as_a_step_at_most(pair: Path) -> None:
    engine = {"policy": "static-tree:20", "max_step_positions": 20}
    assert settings_of(pair, engine=engine).max_tree_positions == 20
    assert settings_of(pair).max_tree_positions == 64
    with pytest.raises(ConfigError, match=r"engine\.policy.*n from 2 to 20"):
        settings_of(pair, engine={**engine, "policy": "static-tree:21"})


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_broken_config_files_are_named(pair: Path, text: str) -> None:
    (pair / "target" / "config.json").write_text(text)
    args = make_args(pair)
    with pytest.raises(ConfigError, match=r"target/config\.json"):
        gateway_settings(args, make_spec(args))


def test_a_small_pool_bounds_the_context(pair: Path) -> None:
    """What is advertised must be servable."""
    args = make_args(pair, engine={"num_pages": 4, "page_size": 16, "policy": "off"})
    spec = make_spec(args)
    assert gateway_settings(args, spec).max_context == 64
    assert engine_limits(spec, 4096, [8]).max_context == 64


def test_relative_folders_start_at_the_working_directory(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pair)
    assert resolve_model_path("target") == str(pair / "target")


def test_then_beside_the_code(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.model_paths.REPOSITORY_ROOT", pair)
    assert resolve_model_path("drafter") == str(pair / "drafter")


@pytest.mark.parametrize("name", ["nowhere", "models/demo", "./a/b", "/no/where", "a/b/c"])
def test_names_that_are_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("services.model_paths.REPOSITORY_ROOT", tmp_path)
    with pytest.raises(ConfigError, match=r"neither a folder with a config\.json nor a hub id"):
        resolve_model_path(name)


def test_hub_ids_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []

    def fetch(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        if name == "org/gone":
            raise OSError("404")
        return "/cache/model"

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert resolve_model_path("org/name") == "/cache/model"
    assert "*.safetensors" in asked[0][1]
    # One small file of tensors that torch reads without running code; nothing else that is a pickle.
    others = [pattern for pattern in asked[0][1] if pattern != "mask_embedding.pt"]
    assert not any("bin" in pattern or "pt" in pattern for pattern in others)
    with pytest.raises(ConfigError, match=r"cannot fetch model 'org/gone' from the hub: 404"):
        resolve_model_path("org/gone")


def settings_of(pair: Path, **sections: Any) -> Any:
    args = make_args(pair, **sections)
    return gateway_settings(args, make_spec(args))


def test_settings_from_configs_alone(pair: Path) -> None:
    settings = settings_of(pair, engine={"policy": "off"}, gateway={"max_body_bytes": 2048})
    assert (settings.model_id, settings.vocab_size) == ("pair", 1000)
    assert settings.max_context == 2048
    assert settings.eos_token_ids == (7,)
    assert settings.max_draft_block_size == 8
    assert (settings.default_policy, settings.max_body_bytes) == ("off", 2048)
    assert settings.sampling == SamplingDefaults(temperature=1.0, top_p=1.0, top_k=0)
    assert settings.version


def test_the_target_caps_the_context(pair: Path) -> None:
    assert settings_of(pair, engine={"max_context": 9999}).max_context == 4096


@pytest.mark.parametrize(
    ("generation", "eos", "sampling"),
    [
        (
            {"eos_token_id": [5, 6], "temperature": 0.6, "top_p": 0.9, "top_k": 20},
            (5, 6),
            SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20),
        ),
        (
            {"min_p": 0.1, "repetition_penalty": 1.05},
            (7,),
            SamplingDefaults(min_p=0.1, repetition_penalty=1.05),
        ),
        (
            {"do_sample": False, "temperature": 0.6},
            (7,),
            SamplingDefaults(temperature=0.0, top_p=1.0, top_k=0),
        ),
    ],
)
def test_generation_config(
    pair: Path, generation: dict[str, Any], eos: tuple[int, ...], sampling: SamplingDefaults
) -> None:
    write(pair / "target", "generation_config.json", generation)
    settings = settings_of(pair)
    assert (settings.eos_token_ids, settings.sampling) == (eos, sampling)


def test_nested_block_size_wins(pair: Path) -> None:
    write(pair / "drafter", "config.json", {"block_size": 8, "dflash_config": {"block_size": 10}})
    assert settings_of(pair).max_draft_block_size == 10


def test_models_without_these_keys(pair: Path) -> None:
    write(pair / "target", "config.json", {"max_position_embeddings": 64, "vocab_size": 10})
    write(pair / "drafter", "config.json", {"num_target_layers": 2})
    settings = settings_of(pair)
    assert (settings.eos_token_ids, settings.max_draft_block_size) == ((), 16)


@pytest.mark.parametrize("name", ["target", "drafter"])
def test_missing_config(pair: Path, name: str) -> None:
    args = make_args(pair)
    spec = make_spec(args)
    (pair / name / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        gateway_settings(args, spec)


def test_every_drafter_has_its_limits(pair: Path) -> None:
    write(pair / "second", "config.json", {**DRAFT, "block_size": 12})
    drafters = {"second": str(pair / "second")}
    settings = settings_of(pair, model={"drafters": drafters, "thinking_drafter": "second"})
    assert settings.drafters == (DrafterLimits("default", 8), DrafterLimits("second", 12))
    assert settings.max_draft_block_size == 12
    assert (settings.thinking_drafter, settings.non_thinking_drafter) == ("second", None)
    args = make_args(pair, model={"drafters": drafters})
    limits = engine_limits(make_spec(args), 4096, [8, 12])
    assert (limits.drafters, limits.max_draft_block_size) == (settings.drafters, 12)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({**DRAFT, "block_size": 4}, r"engine\.policy.*from 2 to 4"),
        ({**DRAFT, "vocab_size": 999}, "vocab_size is 1000 in the target and vocab_size is 999"),
    ],
)
def test_every_drafter_must_suit_the_target_and_the_policy(
    pair: Path, second: dict[str, Any], message: str
) -> None:
    write(pair / "second", "config.json", second)
    with pytest.raises(ConfigError, match=message):
        settings_of(pair, model={"drafters": {"second": str(pair / "second")}})
