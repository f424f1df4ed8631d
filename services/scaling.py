"""Serve's options for the number of engine groups and for the way to them."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from gateway.routing.group_picker import RoutingRules
from services.autoscaling import OutstandingTokensPolicy
from services.config import AppArgs, AutoscalingArgs
from services.request_router import EngineGroupRouter

FIXED_DRAIN_TIMEOUT_S = 10.0


def router_config(args: AppArgs) -> RequestRouterConfig:
    """Return how gateways choose an engine group."""
    rules = RoutingRules(
        page_size=args.engine.page_size,
        prefix_weight=args.routing.prefix_weight,
        load_bound_tokens=args.routing.load_bound_tokens,
        max_names=args.routing.max_known_prefixes,
        ttl_s=args.routing.prefix_ttl_s,
    )
    options: dict[str, Any] = {
        "request_router_class": EngineGroupRouter,
        "request_router_kwargs": asdict(rules),
        "request_routing_stats_period_s": args.routing.report_period_s,
    }
    return RequestRouterConfig(**options)


def replica_options(args: AppArgs) -> dict[str, Any]:
    """Return the options that say how many coordinators run and how they end."""
    scaling = args.autoscaling
    if scaling is None:
        return {
            "num_replicas": args.num_engine_groups,
            "graceful_shutdown_timeout_s": FIXED_DRAIN_TIMEOUT_S,
        }
    return {
        "autoscaling_config": _autoscaling_config(scaling),
        # Scaling down must not cut streams, so a group may take its time.
        "graceful_shutdown_timeout_s": scaling.drain_timeout_s,
    }


def _autoscaling_config(scaling: AutoscalingArgs) -> AutoscalingConfig:
    policy = AutoscalingPolicy(
        policy_function=OutstandingTokensPolicy,
        policy_kwargs={"target_outstanding_tokens": scaling.target_outstanding_tokens},
    )
    with warnings.catch_warnings():
        # Ray deprecates metrics_interval_s for an environment variable that its 2.60 does not read.
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(
            min_replicas=scaling.min_engine_groups,
            max_replicas=scaling.max_engine_groups,
            metrics_interval_s=scaling.report_period_s,
            look_back_period_s=scaling.look_back_period_s,
            upscale_delay_s=scaling.upscale_delay_s,
            downscale_delay_s=scaling.downscale_delay_s,
            policy=policy,
        )
