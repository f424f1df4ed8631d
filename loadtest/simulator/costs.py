"""True time of a served step: draft pass, verify pass, context and host, with noise.

A verify pass costs by the packed positions of all rows, padded to a captured size where the engine captures
graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from gateway.coordinator.block_scheduler.cost_table import CostSample
from gateway.coordinator.block_scheduler.records import FloatArray, IntArray

CONTEXT_UNIT = 1000.0
"""Context is priced per so many committed tokens."""
SWEEP_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SWEEP_WIDTHS = (1, 2, 4, 6, 8, 12, 16)
SWEEP_CONTEXTS = (200, 800)
"""Committed tokens per row that a start-up sweep uses in turn."""


class PassCost(Protocol):
    """Milliseconds of one forward pass."""

    def ms(self, num_rows: int, positions: FloatArray) -> FloatArray:
        """Price passes over ``num_rows`` rows that hold ``positions`` in all."""
        ...


@dataclass(frozen=True, slots=True)
class Roofline:
    """Weights must be read (``floor_ms``) and positions computed (``ms_per_position``); the longer of both,
    rounded.

    ``sharpness`` is how sharp the knee is: 2 is soft, 8 nearly the maximum of both.
    """

    floor_ms: float
    ms_per_position: float
    sharpness: float = 3.0

    def ms(self, num_rows: int, positions: FloatArray) -> FloatArray:
        """See ``PassCost``."""
        compute = positions * self.ms_per_position
        time: FloatArray = (self.floor_ms**self.sharpness + compute**self.sharpness) ** (
            1.0 / self.sharpness
        )
        return time


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: the more positions, the more experts' weights must be read, until all are."""

    dense: Roofline
    expert_ms: float
    """To read all experts."""
    num_experts: int = 128
    num_active: int = 8

    def ms(self, num_rows: int, positions: FloatArray) -> FloatArray:
        """See ``PassCost``."""
        untouched = (1.0 - self.num_active / self.num_experts) ** positions
        time: FloatArray = self.dense.ms(num_rows, positions) + self.expert_ms * (1.0 - untouched)
        return time


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured times ``[rows, widths]``; beyond them in proportion to rows and along the slope of widths."""

    rows: tuple[int, ...]
    widths: tuple[int, ...]
    grid_ms: tuple[tuple[float, ...], ...]

    def ms(self, num_rows: int, positions: FloatArray) -> FloatArray:
        """See ``PassCost``."""
        grid = np.array(self.grid_ms)
        line = np.array([np.interp(num_rows, self.rows, column) for column in grid.T])
        line *= max(1.0, num_rows / self.rows[-1])
        width = positions / num_rows
        slope = (line[1] - line[0]) / (self.widths[1] - self.widths[0])
        below = np.minimum(width - self.widths[0], 0.0) * slope
        time: FloatArray = np.interp(width, self.widths, line) + below
        return time


class StepTime(NamedTuple):
    """One step's time without noise, ``[...]`` like the positions that were asked for."""

    draft_ms: FloatArray
    verify_ms: FloatArray
    step_ms: FloatArray


@dataclass(frozen=True, slots=True)
class ServedCost:
    """What steps take on one machine."""

    name: str
    draft: PassCost
    verify: PassCost
    host_ms: float
    host_ms_per_row: float = 0.0
    draft_host_ms: float = 0.0
    """What a draft pass costs besides its forward: features, hand-over."""
    ms_per_context: float = 0.0
    """Per 1,000 committed tokens of all rows."""
    captured_sizes: tuple[int, ...] = ()
    noise_sd: float = 0.03
    """Of the logarithm of a step's time."""
    outlier_rate: float = 0.0
    outlier_factor: float = 3.0

    def times(
        self,
        num_rows: int,
        positions: IntArray,
        draft_widths: IntArray,
        context: int,
        num_drafted: int | None = None,
    ) -> StepTime:
        """Price steps of ``num_rows`` rows with these verify positions and draft widths; in milliseconds.

        A drafter drafts for the ``num_drafted`` rows that are wider than 1; by default for all.
        """
        num_drafted = num_rows if num_drafted is None else max(1, num_drafted)
        is_drafted = draft_widths > 1
        blocks = self.padded(num_drafted * draft_widths).astype(np.float64)
        drafted = self.draft.ms(num_drafted, blocks)
        draft_ms = np.where(is_drafted, drafted + self.draft_host_ms, 0.0)
        verify_ms = self.verify.ms(num_rows, self.padded(positions).astype(np.float64))
        verify_ms = verify_ms + self.ms_per_context * context / CONTEXT_UNIT
        host = self.host_ms + self.host_ms_per_row * num_rows
        return StepTime(draft_ms, verify_ms, draft_ms + verify_ms + host)

    def padded(self, positions: IntArray) -> IntArray:
        """Return the captured sizes that ``positions`` run at; what is larger than all runs as it is."""
        if not self.captured_sizes:
            return positions
        sizes = _ascending(self.captured_sizes)
        index = np.searchsorted(sizes, positions)
        return np.where(index < len(sizes), sizes[np.minimum(index, len(sizes) - 1)], positions)

    def noise(self, rng: np.random.Generator, num_steps: int) -> FloatArray:
        """Draw ``[num_steps]`` factors on a step's time; the mean is one but for outliers."""
        factors = rng.lognormal(-0.5 * self.noise_sd**2, self.noise_sd, num_steps)
        is_outlier = rng.random(num_steps) < self.outlier_rate
        return np.where(is_outlier, self.outlier_factor * factors, factors)

    def sweep(
        self,
        seed: int,
        rows: Sequence[int] = SWEEP_ROWS,
        widths: Sequence[int] = SWEEP_WIDTHS,
        repeats: int = 4,
    ) -> list[CostSample]:
        """Return what a start-up sweep measures: a few noisy repeats of each ``(rows, width)`` cell."""
        rng = np.random.default_rng([seed, len(rows), len(widths)])
        factors = iter(self.noise(rng, len(rows) * len(widths) * repeats).tolist())
        samples = []
        for num_rows in rows:
            for width in widths:
                for repeat in range(repeats):
                    context = num_rows * SWEEP_CONTEXTS[repeat % len(SWEEP_CONTEXTS)]
                    samples.append(self._sample(num_rows, width, context, next(factors)))
        return samples

    def _sample(self, num_rows: int, width: int, context: int, factor: float) -> CostSample:
        time = self.times(num_rows, np.array([num_rows * width]), np.array([width]), context)
        draft_ms, verify_ms, step_ms = (float(part[0]) * factor for part in time)
        return CostSample(num_rows, width, context, draft_ms, verify_ms, step_ms)


@lru_cache(maxsize=16)
def _ascending(sizes: tuple[int, ...]) -> IntArray:
    return np.array(sorted(sizes))


GRAPH_SIZES = (
    *(1, 2, 4, 8),
    *range(16, 64, 8),
    *range(64, 256, 32),
    *range(256, 1024, 128),
    *range(1024, 4097, 512),
)

MEMORY_BOUND = ServedCost(
    "memory-bound",
    draft=Roofline(0.9, 0.003),
    verify=Roofline(5.0, 0.012, sharpness=4.0),
    host_ms=0.5,
    host_ms_per_row=0.003,
    draft_host_ms=0.5,
    ms_per_context=0.02,
    captured_sizes=GRAPH_SIZES,
)
"""A large GPU with a dense model: flat up to about 400 packed positions."""
COMPUTE_BOUND = ServedCost(
    "compute-bound",
    draft=Roofline(0.8, 0.016, sharpness=2.0),
    verify=Roofline(3.0, 0.12, sharpness=2.0),
    host_ms=0.5,
    host_ms_per_row=0.003,
    draft_host_ms=0.3,
    ms_per_context=0.03,
    captured_sizes=GRAPH_SIZES,
)
"""A GPU with much bandwidth for its arithmetic, or a quantised model: linear from about 25 positions."""
CPU = ServedCost(
    "cpu",
    draft=Measured((1, 8, 32), (4, 8, 16), ((0.9, 1.1, 1.4), (3.0, 4.4, 7.0), (9.5, 14.9, 26.1))),
    verify=Measured(
        (1, 8, 32),
        (1, 4, 8, 16),
        ((2.9, 3.4, 4.1, 5.3), (8.4, 12.6, 17.9, 28.3), (26.6, 41.6, 65.2, 115.0)),
    ),
    host_ms=1.0,
    host_ms_per_row=0.02,
    ms_per_context=0.05,
    noise_sd=0.08,
    outlier_rate=0.003,
)
"""The demo pair on two cores, as measured; more than 32 rows in proportion."""
MOE = ServedCost(
    "moe",
    draft=Roofline(0.9, 0.004),
    verify=Experts(Roofline(2.5, 0.01), expert_ms=9.0),
    host_ms=0.6,
    host_ms_per_row=0.003,
    draft_host_ms=0.5,
    ms_per_context=0.02,
    captured_sizes=GRAPH_SIZES,
)
"""A mixture of 128 experts, 8 active: the first positions touch most of the experts."""
COSTS = {cost.name: cost for cost in (MEMORY_BOUND, COMPUTE_BOUND, CPU, MOE)}
