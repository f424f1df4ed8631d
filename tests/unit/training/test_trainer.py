"""The loop: learning, exact resumption, refusal of another run's state, export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from training_models import tiny_drafter, tiny_rows, tiny_target

from dflash_wire.errors import ConfigError
from drafter.checkpoint import load_draft_model
from drafter.training.attention import ATTENTION_NAME
from drafter.training.capture import TargetTables, TransformersFeatureSource
from drafter.training.config import TrainingConfig
from drafter.training.export import export_drafter
from drafter.training.trainer import Trainer

CONFIG = TrainingConfig(
    draft_block_size=4,
    peak_lr=1e-2,
    max_steps=12,
    tokens_per_step=64,
    max_blocks_per_step=12,
    checkpoint_every=5,
    log_every=4,
    evaluate_every=6,
    use_bf16=True,
)


def _trainer(work: Path, config: TrainingConfig = CONFIG, minutes: float | None = None) -> Trainer:
    target = tiny_target()
    model = tiny_drafter(target, config.draft_block_size)
    source = TransformersFeatureSource(target, model.target_layer_ids)
    rows, tables = tiny_rows(), TargetTables.of(target)
    return Trainer(model, source, tables, rows, rows[:3], config, work, minutes)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resuming_equals_never_having_stopped(tmp_path: Path, optimizer: str) -> None:
    config = TrainingConfig(**{**vars(CONFIG), "optimizer": optimizer})
    whole = _trainer(tmp_path / "whole", config)
    whole.run()
    interrupted = _trainer(tmp_path / "parts", config)
    interrupted.run(until=7)
    resumed = _trainer(tmp_path / "parts", config)
    assert resumed.step == 7
    resumed.run()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_state_of_another_run_is_refused(tmp_path: Path) -> None:
    _trainer(tmp_path).run(until=1)
    other = TrainingConfig(**{**vars(CONFIG), "gamma": 3.0})
    with pytest.raises(ConfigError, match="gamma"):
        _trainer(tmp_path, other)


def test_settings_that_change_nothing_may_differ(tmp_path: Path) -> None:
    _trainer(tmp_path).run(until=1)
    other = TrainingConfig(**{**vars(CONFIG), "log_every": 1})
    assert _trainer(tmp_path, other).step == 1


def test_anchors_are_redrawn_every_epoch_but_fixed_within_a_step(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path)
    assert torch.equal(trainer.scores(0).loss, trainer.scores(0).loss)
    first = trainer._generator(0, 3).initial_seed()
    assert first != trainer._generator(1, 3).initial_seed()
    assert first != trainer._generator(0, 4).initial_seed()


def test_a_small_run_learns(tmp_path: Path) -> None:
    changes = {"max_steps": 100, "use_bf16": False, "evaluate_every": 0}
    config = TrainingConfig(**{**vars(CONFIG), **changes})
    trainer = _trainer(tmp_path, config)
    before = trainer.evaluate()["held_out"]
    trainer.run()
    after = trainer.evaluate()["held_out"]
    assert after["loss"] < before["loss"] - 0.5
    assert after["eal"] > before["eal"] + 1.0


def test_the_target_never_changes(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path)
    before = trainer._tables.embedding.clone()
    trainer.run()
    assert torch.equal(trainer._tables.embedding, before)
    assert trainer._tables.embedding.grad is None


def test_the_log_has_the_agreed_fields(tmp_path: Path) -> None:
    _trainer(tmp_path).run()
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    steps = [r for r in records if "loss" in r]
    assert [r["step"] for r in steps] == [4, 8, 12]
    assert all(len(r["accuracy"]) == 3 and r["eal"] >= 1.0 for r in steps)
    assert [r["step"] for r in records if "held_out" in r] == [6, 12]


def test_minutes_are_turned_into_steps_once(tmp_path: Path) -> None:
    started = _trainer(tmp_path, minutes=0.001)
    assert started.total_steps >= 1
    started.run(until=1)
    assert _trainer(tmp_path, minutes=5.0).total_steps == started.total_steps


def test_timing_steps_does_not_change_the_run(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, minutes=0.001)
    untouched = tiny_drafter(tiny_target()).state_dict()
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, untouched[name])
    assert all(p.grad is None for p in trainer.model.parameters())


def test_export_round_trip(tmp_path: Path) -> None:
    model = tiny_drafter(tiny_target())
    num_parameters = export_drafter(model, tmp_path)
    assert num_parameters == sum(p.numel() for p in model.parameters())
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["architectures"] == ["DFlashDraftModel"]
    assert values["block_size"] == 4
    assert values["dflash_config"] == {"mask_token_id": 3, "target_layer_ids": [1, 2, 3]}
    loaded = load_draft_model(tmp_path, torch.bfloat16, ATTENTION_NAME)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.to(torch.bfloat16))
