"""The paper's values and the checks on settings."""

from __future__ import annotations

import pytest

from dflash_wire.errors import ConfigError
from drafter.training.config import TrainingConfig, default_gamma
from drafter.training.trainer import learning_rate


@pytest.mark.parametrize(
    ("size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0), (4, 2.0), (9, 4.5), (13, 6.0), (22, 9.0)]
)
def test_gamma_follows_the_published_points(size: int, gamma: float) -> None:
    assert default_gamma(size) == pytest.approx(gamma)


def test_defaults_are_the_papers() -> None:
    config = TrainingConfig()
    assert (config.draft_block_size, config.num_anchors, config.decay_length) == (16, 512, 7.0)
    assert (config.optimizer, config.peak_lr, config.weight_decay) == ("adamw", 6e-4, 0.0)
    assert config.clip_norm == 1.0
    assert (config.warmup_ratio, config.epochs, config.max_length) == (0.04, 6, 3072)


def test_a_given_gamma_wins() -> None:
    assert TrainingConfig(gamma=3.0).decay_length == 3.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("draft_block_size", 1),
        ("num_anchors", 0),
        ("warmup_ratio", 1.0),
        ("gamma", 0.0),
        ("optimizer", "sgd"),
    ],
)
def test_bad_values_name_their_field(field: str, value: float | str) -> None:
    with pytest.raises(ConfigError, match=field):
        TrainingConfig(**{field: value})


def test_a_step_budget_is_shared_by_its_rows() -> None:
    config = TrainingConfig(max_blocks_per_step=100, num_anchors=30)
    assert [config.anchors_per_row(n) for n in (1, 4, 200)] == [30, 25, 1]


def test_schedule_warms_up_then_falls_on_a_cosine() -> None:
    config = TrainingConfig(peak_lr=1.0)
    rates = [learning_rate(step, 100, config) for step in range(100)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[52] == pytest.approx(0.5)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert 0 < rates[-1] < 1e-3
