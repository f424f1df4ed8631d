"""Two Ray actors on one card that share a FeaturePool; needs Ray, so it is imported when that is there."""

from __future__ import annotations

from typing import Any

import ray
import torch

from services.feature_pool import FeatureReceiver, FeatureSender
from services.placement import ALIAS, CUDA_IPC, FeatureRoute

SHAPE = (64, 4096)
VALUES = (1.0, 2.5, -3.0)


class Sender:
    """The verifier's end."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._sender = FeatureSender(SHAPE, dtype, torch.device("cuda"), CUDA_IPC)

    def reference(self) -> list[Any]:
        """Of the pool, in a list so that Ray does not resolve it."""
        return [self._sender.reference()]

    def fill(self, value: float) -> None:
        """Write everywhere, and wait for the card."""
        self._sender.pool.fill_(value)
        torch.cuda.synchronize()


class Receiver:
    """The drafter's end."""

    def attach(self, references: list[Any]) -> None:
        """Map the pool."""
        self._receiver = FeatureReceiver(references[0], FeatureRoute(CUDA_IPC, ALIAS))

    def holds(self, value: float) -> bool:
        """Whether it is everywhere."""
        return bool((self._receiver.pool == value).all())


def differing_reads(dtype: torch.dtype) -> float:
    """How many of a few writes the other actor does not see as they were."""
    ray.init(include_dashboard=False, log_to_driver=False)
    try:
        options = {"num_cpus": 0, "num_gpus": 0.5, "enable_tensor_transport": True}
        options["max_concurrency"] = 2
        sender: Any = ray.remote(Sender).options(**options).remote(dtype)
        receiver: Any = ray.remote(Receiver).options(**options).remote()
        ray.get(receiver.attach.remote(ray.get(sender.reference.remote())))
        missed = 0
        for value in VALUES:
            ray.get(sender.fill.remote(value))
            missed += not ray.get(receiver.holds.remote(value))
        return float(missed)
    finally:
        ray.shutdown()
