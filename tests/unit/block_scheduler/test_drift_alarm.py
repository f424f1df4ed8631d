"""Predictions and outcomes that part raise an alarm; outcomes that only scatter do not."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from test_scheduler import land, rows, scheduler

from gateway.coordinator.block_scheduler.guards import DriftAlarm
from gateway.coordinator.block_scheduler.records import StepLoad
from gateway.coordinator.block_scheduler.scheduler import PLAIN, PROBE, SPECULATE


def test_the_alarm_compares_whole_windows() -> None:
    alarm = DriftAlarm(window=4, tolerance=0.2, stretch=1)
    assert [alarm.add(1.0, 1.1) for _ in range(4)] == [False] * 4
    assert alarm.ratio == pytest.approx(1.1)
    assert [alarm.add(1.0, 0.7) for _ in range(4)] == [False, False, False, True]
    assert (alarm.all_predicted, alarm.all_observed) == (8.0, pytest.approx(7.2))


def alarms(observed: Iterable[float], predicted: float) -> list[int]:
    """Steps in which an alarm of default settings was raised."""
    alarm = DriftAlarm()
    return [step for step, tokens in enumerate(observed, 1) if alarm.add(predicted, tokens)]


def test_luck_that_comes_in_runs_is_no_drift() -> None:
    """One text repeats itself for 60 steps of 16 tokens, the next does not: 8.5 per step, if one waits."""
    steps = [step % 120 < 60 for step in range(1800)]
    ratio = sum(16 if hits else 1 for hits in steps[:256]) / 256 / 8.5
    assert ratio > 1.03
    assert alarms([16.0 if hits else 1.0 for hits in steps], 8.5) == []
    # Only of two windows in a row is the sum of repeats up to a fifth more.
    early = [16.0 if step < 160 or hits else 1.0 for step, hits in enumerate(steps)]
    assert sum(early[:256]) / 256 / 8.5 > 1.2
    assert alarms(early, 8.5) == []


def test_a_drift_in_spite_of_luck_is_found_within_windows() -> None:
    steps = [16.0 if step % 120 < 60 else 1.0 for step in range(8 * 256)]
    found = alarms(steps, 4.0)
    assert found
    assert found[0] <= 4 * 256
    assert alarms(steps, 17.0)[0] <= 4 * 256


def test_a_window_is_several_stretches() -> None:
    for window, stretch in ((100, 32), (32, 32)):
        with pytest.raises(ValueError, match="is not several stretches"):
            DriftAlarm(window, stretch=stretch)


def test_drafts_that_are_right_all_or_not_at_all_are_no_failed_predictions() -> None:
    """One stream with prompt lookup: each text is new for a while, and some repeat themselves after that."""
    states, ratios = set[str](), set[float]()
    for seed in range(8):
        rng = np.random.default_rng(seed)
        of = scheduler()
        for seq_id in range(40):
            news, repeats = rng.integers(20, 70), rng.integers(5, 60) * (rng.random() < 0.6)
            for step in range(news + repeats):
                asked = rows(1, first=seq_id)
                decision = of.decide(asked, StepLoad())
                land(of, decision, asked, accepts=float(step >= news))
                states.add(decision.state)
                ratios.add(of.gauges().token_ratio)
            of.forget(seq_id)
    assert max(abs(ratio - 1) for ratio in ratios) > 0.2
    assert {SPECULATE, PROBE} <= states <= {SPECULATE, PROBE, PLAIN}
