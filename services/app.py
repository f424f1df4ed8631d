"""The builder behind ``serve run config.yaml``: the only place that binds deployments.

NOTE: no ``from __future__ import annotations`` here: Serve looks at ``build``'s annotation as a class to
parse the config file's ``args`` with it.
"""

from typing import Any

from ray import serve
from ray.serve import Application, Deployment

from services.config import AppArgs
from services.coordinator_deployment import CoordinatorDeployment
from services.gateway_deployment import GatewayDeployment
from services.placement import COORDINATOR_CPUS, SPREAD, bundles
from services.scaling import replica_options, router_config
from services.settings import gateway_settings
from services.spec import make_spec

GATEWAY_CPUS = 0.25
HEALTH_CHECK_PERIOD_S = 2


def _deployment(cls: type, **options: Any) -> Deployment:
    """``serve.deployment`` used as a function; its type hints only know the decorator."""
    made: Deployment = serve.deployment(**options)(cls)
    return made


def build(args: AppArgs) -> Application:
    """Return the application.

    Args:
        args: the ``args`` of the config file, already checked by pydantic.

    Raises:
        ConfigError: a model is missing; nothing has been started then.
    """
    spec = make_spec(args)
    settings = gateway_settings(args, spec)
    num_lanes = spec.num_lanes
    coordinator = _deployment(
        CoordinatorDeployment,
        name="Coordinator",
        ray_actor_options={"num_cpus": COORDINATOR_CPUS},
        placement_group_bundles=bundles(args, spec.placement),
        placement_group_strategy="SPREAD" if spec.placement == SPREAD else "PACK",
        max_ongoing_requests=num_lanes * (args.engine.max_rows + args.engine.max_waiting),
        max_queued_requests=args.engine.max_waiting,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        request_router_config=router_config(args),
        **replica_options(args),
    ).bind(args, spec)
    application: Application = _deployment(
        GatewayDeployment,
        name="Gateway",
        num_replicas=args.gateway.num_replicas,
        ray_actor_options={"num_cpus": GATEWAY_CPUS},
        max_ongoing_requests=args.gateway.max_ongoing_requests,
        graceful_shutdown_timeout_s=10,
    ).bind(args, settings, spec.target_path, coordinator)
    return application
