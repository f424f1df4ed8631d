"""The coordinator's own cost per step stays small, and hardly grows with the context."""

from __future__ import annotations

import json

import pytest

from services.bench_planning import BAR_MS, PlanningCost, measure, render

NUM_STEPS = 80


@pytest.fixture(scope="module")
def costs() -> dict[int, PlanningCost]:
    return {num_prompt: measure(32, num_prompt, NUM_STEPS) for num_prompt in (300, 2000)}


def test_planning_is_small_beside_a_model_pass(costs: dict[int, PlanningCost]) -> None:
    """CPU time, which a loaded machine doubles; three times the bar, for slow ones."""
    for cost in costs.values():
        assert min(cost.plan_ms, cost.commit_ms) > 0
        assert cost.coordinator_ms < 3 * BAR_MS


def test_cost_does_not_grow_like_the_context(costs: dict[int, PlanningCost]) -> None:
    """Page tables are copied per row and step; nothing else may depend on the tokens behind it."""
    short, long = costs[300], costs[2000]
    assert long.coordinator_ms < 2.5 * short.coordinator_ms
    assert long.plan_bytes < 2000 * 32, "far less than a byte per token of context"


def test_the_report_says_whether_the_bar_is_met(costs: dict[int, PlanningCost]) -> None:
    report = json.loads(render(list(costs.values())).splitlines()[-1])
    assert [cost["num_prompt"] for cost in report["costs"]] == [300, 2000]
    assert report["bar_met"] == (report["worst_ms"] <= BAR_MS)


def test_too_many_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="too many"):
        measure(32, 300, 5000)
