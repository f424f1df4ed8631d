"""The estimator finds the true hazards whatever hides part of the outcomes."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.coordinator.block_scheduler.records import RowOutcome, RowState
from gateway.coordinator.block_scheduler.survival import SurvivalEstimator, SurvivalSettings

STEADY = SurvivalSettings(
    memory_decay=1.0,
    recent_decay=1.0,
    surprised_decay=1.0,
    width_decay=1.0,
    request_decay=1.0,
    prior_trials=1.0,
    width_prior=8.0,
)
"""Nothing fades and priors are weak, so that many outcomes give sharp estimates."""
HAZARDS = [0.9, 0.8, 0.7, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.4, 0.4, 0.4, 0.4, 0.4]


def row(seq_id: int = -1, traffic: str = "") -> RowState:
    return RowState(seq_id, traffic, 16, 100)


def outcome(
    rng: random.Random, hazards: list[float], width: int, cut: int, seq_id: int, traffic: str = ""
) -> RowOutcome:
    """Draft tokens up to the first rejected one, the verify width, or the cut have a fair trial."""
    num_trials = num_accepted = 0
    for hazard in hazards[: min(width - 1, cut)]:
        num_trials += 1
        if rng.random() >= hazard:
            break
        num_accepted += 1
    return RowOutcome(seq_id, traffic, 16, num_trials, num_accepted)


def learn(
    estimator: SurvivalEstimator, num_steps: int, hazards: list[float], traffic: str = ""
) -> None:
    rng = random.Random(1)
    for step in range(num_steps):
        # Every row is a request of its own, cut and narrowed at random.
        rows = [
            outcome(
                rng, hazards, rng.choice((2, 4, 8, 16)), rng.randint(0, 20), 100 * step + i, traffic
            )
            for i in range(20)
        ]
        estimator.observe(rows)
        for one in rows:
            estimator.forget(one.seq_id)


def test_hazards_are_unbiased_under_random_truncation() -> None:
    estimator = SurvivalEstimator(16, STEADY)
    learn(estimator, 600, HAZARDS)
    expected = np.cumprod(HAZARDS)
    assert estimator.class_survival("", 16)[:8] == pytest.approx(expected[:8], abs=0.02)


def test_counting_truncated_positions_as_failures_would_be_seen() -> None:
    """The test above can fail: the common mistake is far outside its tolerance."""
    rng = random.Random(1)
    trials, accepted = np.zeros(15), np.zeros(15)
    for i in range(5000):
        o = outcome(rng, HAZARDS, rng.choice((2, 4, 8, 16)), rng.randint(0, 20), i)
        trials += 1
        accepted[: o.num_accepted] += 1
    assert (accepted / trials)[2] < np.cumprod(HAZARDS)[2] - 0.1


def test_survival_falls_and_is_a_number_without_data() -> None:
    survival = SurvivalEstimator(16).survival([row(1), row(2, "unseen")], [16])[0]
    assert survival.shape == (2, 15)
    assert np.all(np.diff(survival, axis=1) <= 0)
    assert np.all((survival > 0) & (survival < 1))
    assert math.isnan(SurvivalEstimator(16).brier_score)


@given(
    st.lists(
        st.lists(
            st.tuples(
                st.integers(0, 5),
                st.sampled_from(["a", "b"]),
                st.integers(2, 16),
                st.integers(0, 15),
            ),
            max_size=6,
        ),
        max_size=12,
    ),
    st.randoms(),
)
def test_any_history_gives_falling_probabilities(
    steps: list[list[tuple[int, str, int, int]]], rng: random.Random
) -> None:
    estimator = SurvivalEstimator(16)
    for step in steps:
        rows = []
        for seq_id, traffic, width, trials in step:
            trials = min(trials, width - 1)
            accepted = trials - rng.randint(0, min(1, trials))
            rows.append(RowOutcome(seq_id, traffic, width, trials, accepted))
        estimator.observe(rows)
    for width in (2, 4, 16):
        survival = estimator.survival([row(i, t) for i in range(6) for t in "ab"], [width])[0]
        assert survival.shape == (12, width - 1)
        assert np.all(np.isfinite(survival)) and np.all((survival > 0) & (survival < 1))
        assert np.all(np.diff(survival, axis=1) <= 0)


def test_classes_and_requests_differ_from_the_rest() -> None:
    estimator = SurvivalEstimator(16, STEADY)
    rng = random.Random(2)
    good, bad = [0.9] * 15, [0.3] * 15
    for i in range(200):
        estimator.observe(
            [outcome(rng, good, 16, 15, 1000 + i, "code"), outcome(rng, bad, 16, 15, 7, "chat")]
        )
    assert estimator.class_survival("code", 16)[3] > 0.5
    assert estimator.class_survival("chat", 16)[3] < 0.1
    # A request of a good class that fares badly is known for it after a few cycles, and only it.
    for _ in range(12):
        estimator.observe([outcome(rng, bad, 16, 15, 1, "code")])
    bad_one, other = estimator.survival([row(1, "code"), row(2, "code")], [16])[0]
    assert bad_one[2] < other[2] - 0.2
    estimator.forget(1)
    assert estimator.survival([row(1, "code")], [16])[0][0] == pytest.approx(other)


def test_a_narrow_block_that_drafts_worse_has_a_shift_of_its_own() -> None:
    estimator = SurvivalEstimator(16, STEADY)
    rng = random.Random(3)
    for i in range(400):
        wide = outcome(rng, [0.85] * 15, 16, 15, 2 * i)
        narrow = outcome(rng, [0.6] * 15, 4, 15, 2 * i + 1)._replace(draft_width=4)
        estimator.observe([wide, narrow])
        estimator.forget(2 * i)
        estimator.forget(2 * i + 1)
    assert estimator.class_survival("", 16)[0] == pytest.approx(0.85, abs=0.06)
    assert estimator.class_survival("", 4)[0] == pytest.approx(0.6, abs=0.06)


def test_recent_traffic_outweighs_the_past() -> None:
    estimator = SurvivalEstimator(16)
    learn(estimator, 300, [0.9] * 15)
    assert estimator.class_survival("", 16)[3] > 0.55
    learn(estimator, 100, [0.3] * 15)
    assert estimator.class_survival("", 16)[3] < 0.12


def test_what_surprises_a_little_in_every_step_is_soon_believed() -> None:
    """Requests that go on are not to blame for a drafter that has lost its touch."""
    estimator, rng = SurvivalEstimator(16), random.Random(4)
    for step in range(100):
        estimator.observe(
            [outcome(rng, [0.9] * 15, 16, 15, 8 * (step // 10) + i) for i in range(8)]
        )
    assert estimator.class_survival("", 16)[0] > 0.8
    for _ in range(20):
        estimator.observe([outcome(rng, [0.0] * 15, 16, 15, 72 + i) for i in range(8)])
    assert estimator.class_survival("", 16)[0] < 0.3


def test_rows_that_did_not_draft_say_nothing() -> None:
    estimator = SurvivalEstimator(16)
    before = estimator.class_survival("", 16)
    estimator.observe([RowOutcome(1, "", 1, 0, 0)])
    assert estimator.class_survival("", 16) == pytest.approx(before)


def test_brier_score_is_that_of_a_coin_for_a_coin() -> None:
    estimator = SurvivalEstimator(16, STEADY)
    learn(estimator, 300, [0.5] * 15)
    assert estimator.brier_score == pytest.approx(0.25, abs=0.02)


def served(estimator: SurvivalEstimator, num_steps: int, width: int, verified: int) -> float:
    """Serve eight streams of 128 tokens each; return committed over expected tokens after a warm-up.

    Requests differ, and so do cycles: what is easy for one position is easy for the next.
    """
    rng = random.Random(3)
    rows = [RowState(i, "", width, 100) for i in range(8)]
    traits, left = [rng.gauss(0.0, 0.5) for _ in rows], [128] * 8
    expected = committed = 0.0
    for step in range(num_steps):
        survival = estimator.survival(rows, (width,))[0][:, : verified - 1]
        outcomes = []
        for i, each in enumerate(rows):
            ease = math.exp(0.4 + traits[i] + rng.gauss(0.0, 1.0))
            hazards = [ease / (1.0 + ease)] * (width - 1)
            drawn = outcome(rng, hazards, verified, width, each.seq_id)
            outcomes.append(drawn._replace(draft_width=width, width=verified))
            left[i] -= 1 + drawn.num_accepted
            if step > num_steps // 4:
                expected += 1.0 + float(survival[i].sum())
                committed += 1 + drawn.num_accepted
        estimator.observe(outcomes)
        for i, each in enumerate(rows):
            if left[i] <= 0:
                estimator.forget(each.seq_id)
                rows[i] = each._replace(seq_id=each.seq_id + 8)
                traits[i], left[i] = rng.gauss(0.0, 0.5), 128
    return committed / expected


@pytest.mark.parametrize(("width", "verified"), [(4, 4), (8, 8), (16, 8)])
def test_what_is_expected_of_many_requests_is_what_comes(width: int, verified: int) -> None:
    assert served(SurvivalEstimator(16), 2000, width, verified) == pytest.approx(1.0, abs=0.006)
