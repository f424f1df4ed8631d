"""What one simulated run gave, and what is measured of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gateway.coordinator.block_scheduler.records import FloatArray, IntArray

PROBE_STEPS = 2
"""A change of draft width that is taken back within so many steps is a probe, not a switch."""


class StepRecord(NamedTuple):
    """One step; ``RunRecord`` says what the numbers are."""

    tokens: int
    step_ms: float
    expected_tokens: float
    expected_ms: float
    draft_width: int
    positions: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One entry per step in every array.

    ``expected_*`` leave luck out: the mean of what the decision gives in the state that it was made in, by
    the true hazards and the true cost. Their sums differ from the drawn ones by noise only, so runs are
    compared by them.
    """

    tokens: IntArray
    """Committed."""
    step_ms: FloatArray
    expected_tokens: FloatArray
    expected_ms: FloatArray
    draft_widths: IntArray
    positions: IntArray
    """Verified."""
    num_rows: IntArray
    best_rate: FloatArray
    """Highest expected tokens per ms of a static width in the same state; empty unless asked for."""

    @classmethod
    def of(cls, steps: Sequence[StepRecord], best_rates: Sequence[float]) -> RunRecord:
        """Turn steps into columns."""
        columns = [np.array(column) for column in zip(*steps, strict=True)]
        return cls(*columns, *[np.array(best_rates)])

    def first_step(self, warm_up_tokens: int) -> int:
        """Return the first step after ``warm_up_tokens`` have been committed."""
        return int(np.searchsorted(np.cumsum(self.tokens), warm_up_tokens))

    def expected_throughput(self, since: int = 0) -> float:
        """Committed tokens per simulated second from step ``since`` on, luck left out."""
        return 1e3 * float(self.expected_tokens[since:].sum() / self.expected_ms[since:].sum())

    def throughput(self, since: int = 0) -> float:
        """Committed tokens per simulated second from step ``since`` on, as drawn."""
        return 1e3 * float(self.tokens[since:].sum() / self.step_ms[since:].sum())

    def acceptance_length(self, since: int = 0) -> float:
        """Mean committed tokens per cycle, bonus included."""
        return float(self.tokens[since:].sum() / self.num_rows[since:].sum())

    def switches_per_second(self, since: int = 0) -> float:
        """Switches of the draft width per simulated second."""
        return 1e3 * num_switches(self.draft_widths[since:]) / float(self.step_ms[since:].sum())

    def recovery_steps(self, start: int, end: int, share: float = 0.95, window: int = 16) -> int:
        """Steps of the phase ``[start, end)`` until a window's rate reaches ``share`` of the best static's.

        The window looks ahead: it begins at the step that is counted, so one that is reached at once gives
        0. Returns the phase's length if it never is.
        """
        gained = _windows(self.expected_tokens[start:end], window)
        best = _windows(self.best_rate[start:end] * self.expected_ms[start:end], window)
        reached = np.flatnonzero(gained >= share * best)
        return int(reached[0]) if len(reached) else end - start


def num_switches(draft_widths: IntArray) -> int:
    """Count changes between consecutive steps, but none to a width that is back within ``PROBE_STEPS``; from
    one width over such a probe to a third that stays is one change.
    """
    widths = draft_widths.tolist()
    count, step = 0, 1
    while step < len(widths):
        held = widths[step - 1]
        if widths[step] == held:
            step += 1
            continue
        ahead = widths[step + 1 : step + 1 + PROBE_STEPS]
        if held in ahead:
            step += ahead.index(held) + 2
        else:
            count += 1
            step += _steps_over_probe(widths, step) or 1
    return count


def _steps_over_probe(widths: list[int], step: int) -> int:
    """Steps from a probe's first to the one behind the first of a width that stays; 0 if it is no probe."""
    tried = widths[step]
    end = next((i for i in range(step, len(widths)) if widths[i] != tried), len(widths))
    after = widths[end : end + PROBE_STEPS + 1]
    is_probe = end - step <= PROBE_STEPS
    return end + 1 - step if is_probe and after == after[:1] * (PROBE_STEPS + 1) else 0


def _windows(values: FloatArray, window: int) -> FloatArray:
    """Sums over all windows of ``values``, at least one."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    window = min(window, len(values))
    result: FloatArray = sums[window:] - sums[:-window]
    return result
