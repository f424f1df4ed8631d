"""What trees are worth is learned without bias, and a budget of nodes says the same to the drafter."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_wire.trees import LEAST_BIN_SCORE, NUM_SCORE_BINS, packed_scores
from gateway.coordinator.block_scheduler.allocation import Option
from gateway.coordinator.block_scheduler.records import TREES, RowState, TreeRowOutcome
from gateway.coordinator.block_scheduler.trees import (
    MOST_NODES,
    Calibration,
    TreeEstimator,
    most_nodes,
)

BLOCK = 16


def chains(traffic: str, block: int) -> np.ndarray:
    return 0.8 ** np.arange(1.0, block)


BINS = np.linspace(LEAST_BIN_SCORE, 0.0, NUM_SCORE_BINS)


class TreeWorld:
    """Chains of nodes whose chances differ from what the drafter thinks by a power."""

    def __init__(self, seed: int, power: float = 1.5) -> None:
        self.rng = np.random.default_rng(seed)
        self.power = power

    def row(self, num_made: int, num_nodes: int, seq_id: int = 1) -> TreeRowOutcome:
        steps = -self.rng.exponential(0.3, num_made)
        scores = np.cumsum(steps)
        chances = np.exp(steps * self.power)
        lucky = self.rng.random(num_nodes) < chances[:num_nodes]
        accepted = num_nodes if lucky.all() else int(lucky.argmin())
        return TreeRowOutcome(
            seq_id,
            "a",
            BLOCK,
            num_nodes,
            list(range(accepted)),
            packed_scores(scores.tolist()),
            accepted + 1,
            False,
        )


def test_the_calibration_finds_how_often_nodes_of_a_score_are_accepted() -> None:
    estimator, world = TreeEstimator(), TreeWorld(1)
    for _ in range(3000):
        estimator.observe([world.row(12, 8)], chains)
    found = estimator.acceptance("a", BLOCK)
    assert (np.diff(found) >= 0).all()
    for score in (-0.5, -1.0, -2.0):
        true = np.exp(1.5 * score)
        assert float(np.interp(score, BINS, found)) == pytest.approx(true, abs=0.06)


def test_the_curve_says_what_is_accepted() -> None:
    estimator, world = TreeEstimator(), TreeWorld(2)
    rows = [RowState(7, "a", 16, 100)]
    observed = expected = 0.0
    for step in range(4000):
        if step >= 500:
            expected += float(estimator.expected(rows, BLOCK, chains)[0, :6].sum())
        outcome = world.row(12, 6, seq_id=step)
        estimator.observe([outcome], chains)
        estimator.forget(step)
        observed += len(outcome.accepted_nodes) * (step >= 500)
    assert expected == pytest.approx(observed, rel=0.05)


def test_nodes_that_were_made_and_not_verified_tell_the_curve() -> None:
    estimator, world = TreeEstimator(), TreeWorld(3)
    for step in range(2000):
        estimator.observe([world.row(12, 3 if step % 8 else 12, seq_id=step)], chains)
        estimator.forget(step)
    curve = estimator.expected([RowState(1, "a", 16, 0)], BLOCK, chains)[0]
    other = TreeWorld(4)
    hits = np.zeros(12)
    for _ in range(3000):
        hits[other.row(12, 12).accepted_nodes] += 1
    assert curve[:12] == pytest.approx(hits / 3000, abs=0.05)


def test_a_request_that_is_drafted_well_is_told_apart() -> None:
    estimator = TreeEstimator()
    good, bad = TreeWorld(5, power=0.5), TreeWorld(6, power=3.0)
    for _ in range(40):
        estimator.observe([good.row(8, 8, 1), bad.row(8, 8, 2)], chains)
    first, second = estimator.expected(
        [RowState(1, "a", 16, 0), RowState(2, "a", 16, 0)], BLOCK, chains
    )
    assert first[:8].sum() > 1.5 * second[:8].sum()
    estimator.forget(1)
    estimator.forget(2)
    assert estimator.num_requests == 0


def test_nothing_known_and_nothing_verified() -> None:
    estimator = TreeEstimator()
    curve = estimator.expected([RowState(1, "a", 16, 0)], BLOCK, chains)
    assert curve.shape == (1, MOST_NODES)
    assert np.isfinite(curve).all()
    assert (np.diff(curve[0]) <= 0).all()
    assert estimator.acceptance("a", BLOCK) == pytest.approx(np.exp(BINS))
    estimator.observe(
        [TreeRowOutcome(1, "a", BLOCK, 0, [], packed_scores([-1.0]), 1, False)], chains
    )
    estimator.observe([TreeRowOutcome(1, "a", BLOCK, 0, [], b"", 1, False)], chains)
    assert np.isfinite(estimator.expected([RowState(1, "a", 16, 0)], BLOCK, chains)).all()


def test_a_row_that_a_stop_token_cut_says_nothing() -> None:
    estimator, world = TreeEstimator(), TreeWorld(7)
    before = estimator.expected([RowState(1, "a", 16, 0)], BLOCK, chains)
    estimator.observe([world.row(8, 8)._replace(is_cut=True)], chains)
    assert (estimator.expected([RowState(1, "a", 16, 0)], BLOCK, chains) == before).all()


def test_a_calibration_rises_whatever_was_seen() -> None:
    calibration = Calibration()
    scores = np.array([-0.1] * 50 + [-4.0] * 50)
    calibration.add(scores, np.array([0.0] * 50 + [1.0] * 50), 1.0)
    found = calibration.probabilities(1.0)
    assert (np.diff(found) >= 0).all()
    assert ((found >= 0) & (found <= 1)).all()


def test_a_share_offers_the_plan_and_prices_around_it() -> None:
    estimator = TreeEstimator()
    rows = [RowState(i, "a", 16, 100) for i in range(4)]
    nodes = np.arange(0, 4 * most_nodes(4) + 1, 2)
    share = estimator.share(rows, Option(TREES + BLOCK, 24, 9.0, 6.0), nodes, 5.0 + 0.1 * nodes)
    assert share.num_nodes[0] == 0
    assert len(share.num_nodes) == len(share.step_ms) <= 24
    assert share.num_nodes[-1] >= 20
    assert share.most_width == 1 + 6 + 2 * 5
    assert share.expected_tokens == pytest.approx(9.0)
    assert set(share.acceptance) == {"a"}


def test_what_sharing_gains_is_learned() -> None:
    estimator = TreeEstimator()
    rows = [RowState(1, "a", 16, 100)]
    nodes = np.arange(0, 30)
    for _ in range(2000):
        gain = estimator.gain
        option = Option(TREES + BLOCK, 11, 1.0 + 3.0 * gain.tokens, 6.0 * gain.time)
        share = estimator.share(rows, option, nodes, 5.0 + 0.1 * nodes)
        assert (share.expected_tokens, share.expected_ms) == pytest.approx((4.0, 6.0))
        estimator.observe_gain(share, 20, 5)
    assert estimator.gain.tokens == pytest.approx(5 / 4, rel=0.02)
    assert estimator.gain.time == pytest.approx((5.0 + 2.0) / 6.0, rel=0.02)
