"""The FeaturePool: one buffer, put into Ray Direct Transport once, read by the drafter every step.

``alias``: the reference is resolved once and the drafter reads the verifier's memory.
``pull``: the reference is resolved anew each step into a registered buffer of the drafter's own.
"""

from __future__ import annotations

from typing import Any

import ray
import torch
from ray.experimental import register_nixl_memory, set_target_for_ref
from torch import Tensor

from services.placement import NIXL, PULL, SHM, FeatureRoute
from services.shm_transport import allocate_shared, release_name


class FeatureSender:
    """The verifier's end: allocates the pool and owns its reference.

    The process has registered the shared-memory transport before (``register_shm_transport``).
    Owner: the verifier actor; only the verifier engine writes ``pool``.

    Args:
        shape: rows and width of the pool.
        dtype: element type.
        device: where the pool lives.
        transport: ``shm``, ``cuda_ipc`` or ``nixl``.

    Raises:
        ConfigError: shared memory is full.
    """

    def __init__(
        self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, transport: str
    ) -> None:
        self._transport = transport
        if transport == SHM:
            self.pool = allocate_shared(shape, dtype)
        else:
            self.pool = torch.zeros(shape, dtype=dtype, device=device)
        self._ref: Any = None

    def reference(self) -> Any:
        """Put the pool into direct transport; call once, inside the actor."""
        self._ref = ray.put([self.pool], _tensor_transport=self._transport.upper())
        return self._ref

    def peer_attached(self) -> None:
        """The drafter has mapped the pool: its name is no longer needed."""
        if self._transport == SHM:
            release_name(self.pool)


class FeatureReceiver:
    """The drafter's end. ``pool`` is what the drafter engine reads."""

    def __init__(self, reference: Any, route: FeatureRoute) -> None:
        self._reference = reference
        (mapped,) = ray.get(reference)
        self._mode = route.mode
        self.pool: Tensor = mapped
        if route.mode == PULL:
            self.pool = torch.empty_like(mapped)
            if route.transport == NIXL:
                register_nixl_memory(self.pool)  # once, not for every pull
            set_target_for_ref(reference, [self.pool])

    def refresh(self) -> None:
        """Make the pool current for this step: a pull, or nothing."""
        if self._mode == PULL:
            ray.get(self._reference)
