"""The FeaturePool: one buffer, put into Ray Direct Transport once, read by the drafter every step.

``alias``: the reference is resolved once and the drafter reads the verifier's memory.
``pull``: the reference is resolved anew each step into a registered buffer of the drafter's own.
"""

from __future__ import annotations

from typing import Any

import ray
import torch
from ray.experimental import set_target_for_ref
from torch import Tensor

from dflash_wire.errors import ConfigError
from services.shm_transport import (
    TRANSPORT,
    allocate_shared,
    release_name,
)


def choose_transport(transport: str, device: str) -> str:
    """Return Ray's name of the transport for a device.

    Raises:
        ConfigError: the transport does not work on that device.
    """
    wanted = {"auto": "shm" if device == "cpu" else "cuda_ipc"}.get(transport, transport)
    if (wanted == "shm") != (device == "cpu"):
        raise ConfigError(f"features.transport {wanted!r} does not work on device {device!r}")
    return TRANSPORT if wanted == "shm" else "CUDA_IPC"


class FeatureSender:
    """The verifier's end: allocates the pool and owns its reference.

    The process has registered the shared-memory transport before (``register_shm_transport``).
    Owner: the verifier actor; only the verifier engine writes ``pool``.
    """

    def __init__(
        self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, transport: str
    ) -> None:
        self.transport = choose_transport(transport, device.type)
        if self.transport == TRANSPORT:
            self.pool = allocate_shared(shape, dtype)
        else:
            self.pool = torch.zeros(shape, dtype=dtype, device=device)
        self._ref: Any = None

    def reference(self) -> Any:
        """Put the pool into direct transport; call once, inside the actor."""
        self._ref = ray.put([self.pool], _tensor_transport=self.transport)
        return self._ref

    def peer_attached(self) -> None:
        """The drafter has mapped the pool: its name is no longer needed."""
        release_name(self.pool)


class FeatureReceiver:
    """The drafter's end. ``pool`` is what the drafter engine reads."""

    def __init__(self, reference: Any, mode: str) -> None:
        self._reference = reference
        (mapped,) = ray.get(reference)
        self._mode = mode
        self.pool: Tensor = mapped
        if mode == "pull":
            self.pool = torch.empty_like(mapped)
            set_target_for_ref(reference, [self.pool])

    def refresh(self) -> None:
        """Make the pool current for this step: a pull, or nothing."""
        if self._mode == "pull":
            ray.get(self._reference)
