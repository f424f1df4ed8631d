"""The policy by itself, and the options that carry it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from services.autoscaling import OUTSTANDING_TOKENS, OutstandingTokensPolicy, groups_needed
from services.config import AppArgs
from services.scaling import replica_options, router_config

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("outstanding", "num_groups", "wanted"),
    [
        ([0.0], 1, 0.0),
        ([1000.0], 1, 1.0),
        ([1500.0], 1, 1.5),
        ([6000.0, 0.0], 2, 6.0),
        ([100.0, 100.0, 100.0], 3, 0.3),
        ([1500.0], 2, 1.5),  # the second group is still starting
        ([], 2, 2),
    ],
)
def test_groups_needed(outstanding: list[float], num_groups: int, wanted: float) -> None:
    assert groups_needed(outstanding, num_groups, 1000.0) == pytest.approx(wanted)


def context(metrics: dict[str, dict[str, float]] | None, *running: str) -> Any:
    return SimpleNamespace(
        aggregated_metrics=metrics, running_replicas=list(running), target_num_replicas=3
    )


def test_policy_reads_running_replicas_only() -> None:
    policy = OutstandingTokensPolicy(target_outstanding_tokens=500)
    metrics = {
        OUTSTANDING_TOKENS: {"a": 600.0, "b": 900.0, "stopping": 5000.0},
        "other": {"a": 9.0},
    }
    assert policy(context(metrics, "a", "b", "starting")) == (3.0, {})


@pytest.mark.parametrize("metrics", [None, {}, {"other": {"a": 9.0}}])
def test_policy_stays_when_nothing_is_known(metrics: dict[str, dict[str, float]] | None) -> None:
    assert OutstandingTokensPolicy(500)(context(metrics, "a")) == (3, {})


def test_options_without_autoscaling() -> None:
    options = replica_options(AppArgs(num_engine_groups=3))
    assert options == {"num_replicas": 3, "graceful_shutdown_timeout_s": 10.0}


def test_options_with_autoscaling() -> None:
    args = AppArgs.model_validate(
        {"autoscaling": {"min_engine_groups": 2, "max_engine_groups": 5, "drain_timeout_s": 77}}
    )
    options = replica_options(args)
    config = options["autoscaling_config"]
    assert (config.min_replicas, config.max_replicas) == (2, 5)
    assert config.metrics_interval_s == args.autoscaling.report_period_s  # type: ignore[union-attr]
    assert options["graceful_shutdown_timeout_s"] == 77
    policy = config.policy.get_policy()(**config.policy.policy_kwargs)
    wanted, _ = policy(context({OUTSTANDING_TOKENS: {"a": 3 * 8192.0}}, "a"))
    assert wanted == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"autoscaling": {"min_engine_groups": 3, "max_engine_groups": 2}}, "larger than"),
        ({"autoscaling": {"max_engine_groups": 2}, "num_engine_groups": 2}, "not both"),
        ({"autoscaling": {}}, "max_engine_groups"),
        ({"autoscaling": {"max_engine_groups": 2, "look_back_period_s": 5}}, "longer than"),
        ({"autoscaling": {"max_engine_groups": 2, "target_outstanding_tokens": 0}}, "target"),
    ],
)
def test_what_cannot_work_is_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AppArgs.model_validate(args)


def test_router_is_given_the_rules() -> None:
    args = AppArgs.model_validate(
        {"engine": {"page_size": 32}, "routing": {"prefix_weight": 3, "report_period_s": 0.5}}
    )
    config = router_config(args)
    assert config.request_router_kwargs["page_size"] == 32
    assert config.request_router_kwargs["prefix_weight"] == 3
    assert config.request_routing_stats_period_s == 0.5
