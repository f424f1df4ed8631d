"""One key of the config chooses what drafts: from arguments and JSON files to specs and settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from dflash_wire.drafters import DrafterLimits
from dflash_wire.errors import ConfigError
from gateway.state import GatewaySettings
from services.config import AppArgs
from services.drafter_kinds import DrafterKind
from services.engines import engine_limits
from services.settings import gateway_settings
from services.spec import EngineSpec, make_spec
from services.step_costs import fingerprint

pytestmark = pytest.mark.unit

TARGET = {
    "max_position_embeddings": 4096,
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 8,
}
DECODER = {"hidden_size": 64, "vocab_size": 1000}
CONFIGS: dict[str, tuple[dict[str, Any], DrafterKind, int]] = {
    "z-lab": ({**DECODER, "dflash_config": {"block_size": 12}}, DrafterKind.DFLASH, 12),
    "speculators": (
        {"speculators_model_type": "dflash", "transformer_layer_config": DECODER},
        DrafterKind.DFLASH,
        8,
    ),
    "public eagle": (
        {**DECODER, "architectures": ["LlamaForCausalLMEagle3"]},
        DrafterKind.EAGLE3,
        16,
    ),
    "speculators eagle": (
        {"speculators_model_type": "eagle3", "transformer_layer_config": DECODER},
        DrafterKind.EAGLE3,
        16,
    ),
}


@pytest.fixture
def target(tmp_path: Path) -> str:
    return write(tmp_path / "target", TARGET)


def write(path: Path, values: dict[str, Any]) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(values))
    return str(path)


def made(target: str, policy: str = "adaptive", **model: Any) -> tuple[EngineSpec, GatewaySettings]:
    args = AppArgs.model_validate(
        {"model": {"target": target, **model}, "engine": {"policy": policy}}
    )
    spec = make_spec(args)
    return spec, gateway_settings(args, spec)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_says_what_it_is(target: str, tmp_path: Path, name: str) -> None:
    values, kind, size = CONFIGS[name]
    spec, settings = made(target, drafter=write(tmp_path / "drafter", values))
    assert [drafter.kind for drafter in spec.drafters] == [kind]
    reads_tokens = kind is DrafterKind.EAGLE3
    assert settings.drafters == (DrafterLimits("default", size, reads_tokens),)
    assert engine_limits(spec, 4096, [size]).drafters == settings.drafters


@pytest.mark.parametrize("folder", ["ngram", "none", "Qwen3-eagle3", "dflash2", "off"])
@pytest.mark.parametrize("name", CONFIGS)
def test_names_of_folders_say_nothing(tmp_path: Path, name: str, folder: str) -> None:
    values, kind, _ = CONFIGS[name]
    target = write(tmp_path / "Qwen3-8B-DFlash-eagle3", TARGET)
    spec, _ = made(target, drafter=write(tmp_path / folder, values))
    assert [drafter.kind for drafter in spec.drafters] == [kind]


@pytest.mark.parametrize("name", CONFIGS)
def test_another_targets_drafter_is_refused(target: str, tmp_path: Path, name: str) -> None:
    values = json.loads(json.dumps(CONFIGS[name][0]).replace("1000", "999"))
    with pytest.raises(ConfigError, match="vocab_size is 1000 in the target and vocab_size is 999"):
        made(target, drafter=write(tmp_path / "drafter", values))


def test_prompt_lookup_needs_no_folder(target: str) -> None:
    spec, settings = made(target, drafter="ngram", chain_width=6, ngram_match=(1, 3))
    assert [(d.kind, d.path) for d in spec.drafters] == [(DrafterKind.NGRAM, "")]
    assert (spec.chain_width, spec.ngram_match) == (6, (1, 3))
    assert settings.drafters == (DrafterLimits("default", 6, reads_tokens=True),)
    with pytest.raises(ConfigError, match=r"engine\.policy.*from 2 to 6"):
        made(target, policy="static:7", drafter="ngram", chain_width=6)


def test_no_drafter_leaves_plain_decoding(target: str) -> None:
    spec, settings = made(target, drafter="none")
    assert (spec.drafters, settings.drafters, settings.max_draft_block_size) == ((), (), 1)
    limits = engine_limits(spec, 4096, [])
    assert (limits.max_draft_block_size, limits.all_drafters) == (1, (DrafterLimits("default", 1),))
    for policy in ("static:2", "static-tree:8"):
        with pytest.raises(ConfigError, match=r"engine\.policy.*nobody drafts here"):
            made(target, policy=policy, drafter="none")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"drafter": "none", "drafters": {"a": "ngram"}}, "with 'none' there are no others"),
        ({"drafters": {"a": "none"}}, "with 'none' there are no others"),
        ({"chain_width": 1}, "chain_width"),
        ({"ngram_match": [3, 2]}, "ngram_match: the first number is the smaller one"),
        ({"ngram_match": [0, 2]}, "ngram_match"),
        ({"drafter": "none", "thinking_drafter": "default"}, "there is no drafter 'default'"),
    ],
)
def test_what_cannot_be(model: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AppArgs.model_validate({"model": model})


def test_measured_costs_are_those_of_the_same_drafter(target: str, tmp_path: Path) -> None:
    """Else a start would take another drafter's for its own."""
    eagle = write(tmp_path / "drafter", CONFIGS["public eagle"][0])
    models = [
        {"drafter": "none"},
        {"drafter": "ngram"},
        {"drafter": "ngram", "chain_width": 8},
        {"drafter": "ngram", "ngram_match": [1, 4]},
        {"drafter": eagle},
        {"drafter": eagle, "chain_width": 8},
        {"drafter": eagle, "drafters": {"lookup": "ngram"}},
    ]
    found = set()
    for model in models:
        args = AppArgs.model_validate({"model": {"target": target, **model}})
        found.add(json.dumps(fingerprint(args, make_spec(args), "ring")))
    assert len(found) == len(models)
