"""What the parts of a run share: the device, the clock, the deadline, and the pair once it is built."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch

from dflash_ops.context_attention import (
    ContextAttention,
    PlainContext,
    choose_context_attention,
)
from services.gpu_check.pair import RandomPair
from services.gpu_check.shapes import Shape

WARM_UPS = 2
LEAST_RUNS, MOST_RUNS = 5, 30
RUNS_MS = 200.0
"""About so long a figure is repeated."""


class NoTimeLeftError(Exception):
    """The run's time is over; what was found so far stays."""


class CutOff(BaseException):
    """The run was told to end. No part takes it for an error of its own."""


class Ending:
    """Whether the run was told to end. Owner: the session; as a signal's handler it mutates.

    It interrupts parts alone, and once: results are written whole, and what a part leaves behind is put away
    in peace.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self._is_in_part = False

    def __call__(self, *_: object) -> None:
        """Take the signal.

        Raises:
            CutOff: within a part.
        """
        self.is_asked = True
        if self._is_in_part:
            self._is_in_part = False
            raise CutOff

    @contextmanager
    def interrupts(self) -> Iterator[None]:
        """What runs within is a part."""
        self._is_in_part = True
        try:
            yield
        finally:
            self._is_in_part = False


class NotHereError(Exception):
    """A part needs something that this machine does not have."""


@dataclass(slots=True)
class Ceilings:
    """What the card was seen to do at most."""

    bytes_per_ms: float
    """Of a copy, read and written bytes both counted."""
    flops_per_ms: float
    """Of a large product in the pair's type, a multiplication and an addition counted as two."""


class Session:
    """One run. Owner: the main function.

    Args:
        shape: of the pair, and sizes.
        device: where it runs.
        budget_s: of the whole run.
    """

    def __init__(self, shape: Shape, device: torch.device, budget_s: float) -> None:
        self.shape = shape
        self.device = device
        self.ending = Ending()
        self.dtype: torch.dtype = getattr(torch, shape.dtype)
        self.ceilings: Ceilings | None = None
        self.times: dict[tuple[str, int, int, int], float] = {}
        """Milliseconds of (pass, width, rows, context), for the parts behind the one that measures them."""
        self._ends = time.monotonic() + budget_s

    @property
    def is_cuda(self) -> bool:
        """Whether figures mean anything."""
        return self.device.type == "cuda"

    @cached_property
    def form(self) -> ContextAttention:
        """How context is attended here; the form that needs nothing where there is no card."""
        config = self.shape.target
        heads = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        found = choose_context_attention(self.device, self.dtype, *heads, self.shape.page_size)
        return PlainContext() if found is None else found

    @cached_property
    def pair(self) -> RandomPair:
        """The engines; built when a part asks first."""
        with torch.inference_mode(False):  # other processes get at its tensors
            return RandomPair(self.shape, self.device, self.form)

    def check_time(self) -> None:
        """Parts ask before each of their figures.

        Raises:
            NoTimeLeftError: the budget is used up.
        """
        if time.monotonic() > self._ends:
            raise NoTimeLeftError

    def settle(self) -> None:
        """Wait until the device has nothing to do."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def device_ms(self, run: Callable[[], object]) -> float:
        """Median time of ``run`` on the device, by CUDA events; by the clock on a CPU."""
        if not self.is_cuda:
            return self.wall_ms(run)
        self.check_time()
        for _ in range(WARM_UPS):
            run()
        began = [torch.cuda.Event(enable_timing=True) for _ in range(MOST_RUNS)]
        ended = [torch.cuda.Event(enable_timing=True) for _ in range(MOST_RUNS)]
        self.settle()
        count, once = LEAST_RUNS, time.perf_counter()
        for i in range(MOST_RUNS):
            if i >= count:
                break
            began[i].record()
            run()
            ended[i].record()
            if i == 0:
                self.settle()
                count = runs_for(1e3 * (time.perf_counter() - once))
        self.settle()
        return statistics.median(float(began[i].elapsed_time(ended[i])) for i in range(count))

    def wall_ms(self, run: Callable[[], object]) -> float:
        """Median time of ``run`` by the clock; what it gives the device must be over when it returns."""
        self.check_time()
        for _ in range(WARM_UPS):
            run()
        self.settle()
        found: list[float] = []
        count = LEAST_RUNS
        while len(found) < count:
            began = time.perf_counter()
            run()
            found.append(1e3 * (time.perf_counter() - began))
            if len(found) == 1:
                count = runs_for(found[0])
        return statistics.median(found)


def runs_for(once_ms: float) -> int:
    """How often to repeat what takes so long."""
    return max(LEAST_RUNS, min(MOST_RUNS, int(RUNS_MS / max(once_ms, 1e-3))))
