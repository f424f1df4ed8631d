"""The application that ``make bench-gateway`` starts: the real gateway over a ``PacedCoordinator``.

NOTE: no ``from __future__ import annotations`` here, as in ``services.app``.
"""

from typing import Any

from pydantic import Field
from ray import serve
from ray.serve import Application

from services.config import AppArgs
from services.gateway_deployment import GatewayDeployment
from services.paced_engine import PacedCoordinator
from services.settings import gateway_settings
from services.spec import make_spec


class PacedArgs(AppArgs):
    """The application's arguments and the engine's pace."""

    step_ms: float = Field(64.0, gt=0, description="One block per stream and step.")


def build(args: PacedArgs) -> Application:
    """Return the application."""
    spec = make_spec(args)
    deployment: Any = serve.deployment  # its type hints only know the decorator
    options = {
        "ray_actor_options": {"num_cpus": 0},
        "max_ongoing_requests": args.gateway.max_ongoing_requests,
    }
    coordinator = deployment(PacedCoordinator, name="Coordinator", **options).bind(
        spec.target_path, args.step_ms * 1e-3
    )
    application: Application = deployment(GatewayDeployment, name="Gateway", **options).bind(
        args, gateway_settings(args, spec), spec.target_path, coordinator
    )
    return application
