"""Passes that are captured once and replayed: one CUDA graph per bucket, within bounds.

A pass is a function over static memory (``static_rows``) that returns one tensor and may be repeated: run
again on the same inputs it does the same. On a GPU it runs a few times as it is, is captured, and is replayed
from then on. On a CPU it runs as it is every time, over the same memory and with the same padding, which is
how tests hold what a replay would compute.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

Pass = Callable[[], Tensor]
NUM_WARM_UPS = 2
"""Runs before a capture: libraries allocate and choose kernels in the first ones."""
MOST_GRAPHS = 256
"""Of one kind of pass: what the driver keeps of each is memory that nobody counts."""


@dataclass(slots=True)
class _Known:
    """A pass, captured or not."""

    function: Pass
    graph: torch.cuda.CUDAGraph | None = None
    output: Tensor | None = None
    """Where every replay leaves its result."""


@dataclass(frozen=True, slots=True)
class GraphMemory:
    """What captured passes hold."""

    num_captured: int
    num_plain: int
    """Passes that the bounds left uncaptured."""
    num_bytes: int

    def __str__(self) -> str:
        left = f", {self.num_plain} left uncaptured by the bounds" if self.num_plain else ""
        return f"{self.num_captured} graphs in {self.num_bytes / 2**20:.0f} MiB{left}"


class StaticPasses:
    """Passes by bucket. Owner: an engine; runs them in one thread, one after another.

    All graphs share one memory pool: what a pass leaves is overwritten by the next, whichever it is, so its
    result must have been taken by then.

    Args:
        name: for logs.
        device: where they run; on a CPU nothing is captured.
        limit_bytes: once graphs hold so much, or one could not be captured, no more are; 0: none are.
    """

    def __init__(self, name: str, device: torch.device, limit_bytes: int) -> None:
        self._name = name
        self._device = device
        self._limit_bytes = limit_bytes
        self._passes: dict[Hashable, _Known] = {}
        self._memory_pool: Any = None
        self._num_captured = 0
        self._num_bytes = 0
        self.is_replaying = True
        """False: captured passes run as they are too, to compare."""

    @property
    def keys(self) -> list[Hashable]:
        """Of the passes that have run, in the order of their first runs."""
        return list(self._passes)

    @property
    def memory(self) -> GraphMemory:
        """What is held now."""
        num_plain = len(self._passes) - self._num_captured if self._device.type == "cuda" else 0
        return GraphMemory(self._num_captured, num_plain, self._num_bytes)

    def run(self, key: Hashable, make: Callable[[], Pass]) -> Tensor:
        """Run a pass; the first time it is made, and captured where that is possible.

        Args:
            key: of the pass.
            make: called once; the function's inputs must be filled when ``run`` is called, also then.

        Returns:
            its result, valid until the next run of any pass.
        """
        known = self._passes.get(key)
        if known is None:
            known = self._passes[key] = _Known(make())
            if self._may_capture():
                self._try_capture(key, known)
        if known.graph is None or not self.is_replaying:
            return known.function()
        known.graph.replay()
        assert known.output is not None
        return known.output

    def _may_capture(self) -> bool:
        is_within = self._num_bytes < self._limit_bytes and self._num_captured < MOST_GRAPHS
        return self._device.type == "cuda" and is_within

    def _try_capture(self, key: Hashable, known: _Known) -> None:
        """Capture a pass; where that does not work, passes run as they are from now on."""
        try:
            self._capture(key, known)
        except RuntimeError:
            logger.exception("%s pass %s cannot be captured; no more are", self._name, key)
            self._limit_bytes = 0
            known.output = None

    def _capture(self, key: Hashable, known: _Known) -> None:
        for _ in range(NUM_WARM_UPS):
            known.function()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # what is reserved beyond this is the graph's
        before = torch.cuda.memory_reserved(self._device)
        if self._memory_pool is None:
            self._memory_pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: this one alone must do nothing that cannot be captured.
        with torch.cuda.graph(graph, pool=self._memory_pool, capture_error_mode="thread_local"):
            known.output = known.function()
        known.graph = graph
        self._num_captured += 1
        self._num_bytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        logger.info("%s pass %s captured; %s", self._name, key, self.memory)
