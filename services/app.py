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
from services.scaling import replica_options, router_config
from services.settings import gateway_settings
from services.spec import make_spec

# The replica itself needs a core's share besides its executors.
COORDINATOR_CPUS = 0.25
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
    num_lanes, num_drafters = spec.num_lanes, len(spec.drafters)
    num_verifiers = num_lanes * spec.num_ranks
    executors = [args.verifier] * num_verifiers + [args.drafter] * num_drafters
    bundle = {
        "CPU": COORDINATOR_CPUS + sum(executor.num_cpus for executor in executors),
        "GPU": sum(executor.num_gpus for executor in executors),
    }
    coordinator = _deployment(
        CoordinatorDeployment,
        name="Coordinator",
        ray_actor_options={"num_cpus": COORDINATOR_CPUS},
        placement_group_bundles=[{name: n for name, n in bundle.items() if n > 0}],
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
