"""What the shipped rule is worth under simulated chat traffic; docs/log.md has the table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from simulated_groups import PAGE, Outcome, Simulation

from gateway.routing.group_picker import RoutingRules
from services.config import AppArgs
from services.scaling import router_config

pytestmark = pytest.mark.unit


def outcome(rules: RoutingRules | None) -> Outcome:
    return Simulation(rules, rate_per_s=8.0, num_conversations=160).run()


def shipped() -> RoutingRules:
    return RoutingRules(**router_config(AppArgs()).request_router_kwargs)


def test_more_is_cached_and_nobody_waits_longer() -> None:
    rule, by_load = outcome(shipped()), outcome(RoutingRules(PAGE, prefix_weight=0))
    assert rule.cached_share > by_load.cached_share + 0.1
    assert rule.first_token_p50_s < by_load.first_token_p50_s
    assert rule.first_token_p95_s < by_load.first_token_p95_s


def test_without_a_bound_the_unlucky_wait_longer() -> None:
    rule = outcome(shipped())
    endless = outcome(RoutingRules(PAGE, prefix_weight=1000, load_bound_tokens=1e9))
    assert rule.first_token_p95_s < 0.9 * endless.first_token_p95_s
