"""What keeps the choice of a draft width from flapping, and what makes it look around.

The draft width changes when the regret of keeping it has added up: a change that promises 4 % comes after
some eight steps, one that promises 1 % after thirty, one that promises a half never; and the more it has
changed of late, the more it takes. A step that would be too wide for a load that has just grown is narrowed
at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.coordinator.block_scheduler.allocation import Allocation


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """How much regret is enough, and how often to look around."""

    dwell_steps: int = 8
    """A draft width is kept for at least so many steps, unless the load grows."""
    regret: float = 0.25
    """Added-up relative gains that make a change, in steps' worth."""
    flap_steps: int = 128
    """Each change doubles the regret that the next one needs; so many steps without one halve it again."""
    most_regret: float = 4.0
    regret_decay: float = 0.98
    plain_margin: float = 0.01
    """Speculation must promise so much more than plain decoding."""
    first_probe: int = 16
    """Steps until another draft width is tried for a step; doubles while that changes nothing."""
    last_probe: int = 512
    rows_per_probe: int = 32
    """One row in so many is drafted in a probe out of plain decoding."""


class WidthGuard:
    """The draft width in use, and the regret of keeping it. Owner: the block scheduler."""

    def __init__(self, settings: GuardSettings) -> None:
        self._settings = settings
        self._regret = 0.0
        self._needed = settings.regret
        self._steps_kept = 0
        self._bucket = 0
        self.draft_width = 0
        """0 before the first choice."""
        self.num_switches = 0

    def choose(self, options: Mapping[int, Allocation], num_rows: int) -> tuple[Allocation, str]:
        """Return the option to take, by draft width, and why. Mutates.

        Args:
            options: the best allocation of each draft width, 1 among them.
            num_rows: verify rows of the step.
        """
        best = max(options.values(), key=self._value)
        bucket = max(num_rows - 1, 0).bit_length()
        has_grown, self._bucket = bucket > self._bucket, bucket
        self._steps_kept += 1
        if self._steps_kept % self._settings.flap_steps == 0:
            self._needed = max(self._settings.regret, self._needed / 2)
        if self.draft_width not in options:
            return self._switch(best, "first choice")
        kept = options[self.draft_width]
        gain = self._value(best) / self._value(kept) - 1
        self._regret = self._regret * self._settings.regret_decay + gain
        if best is kept:
            return kept, "still best"
        if has_grown and best.draft_width < kept.draft_width and gain > 0.02:
            return self._switch(best, f"load grew to {num_rows} rows, {gain:+.1%}")
        if self._steps_kept < self._settings.dwell_steps:
            return (
                kept,
                f"kept for {self._steps_kept} steps, {best.draft_width} promises {gain:+.1%}",
            )
        if self._regret < self._needed:
            return kept, f"{best.draft_width} promises only {gain:+.1%}"
        return self._switch(best, f"{gain:+.1%} over {kept.draft_width}")

    def _value(self, option: Allocation) -> float:
        margin = 1 + self._settings.plain_margin if option.draft_width == 1 else 1.0
        return option.tokens_per_ms * margin

    def _switch(self, option: Allocation, why: str) -> tuple[Allocation, str]:
        if self.draft_width:
            self.num_switches += 1
            self._needed = min(self._settings.most_regret, 2 * self._needed)
        self.draft_width = option.draft_width
        self._regret, self._steps_kept = 0.0, 0
        return option, f"changed: {why}"


class ProbeClock:
    """When to try another draft width for one step. Owner: the block scheduler."""

    def __init__(self, settings: GuardSettings) -> None:
        self._settings = settings
        self._interval = settings.first_probe
        self._waited = 0
        self._watched: object = None

    def is_due(self, watched: object) -> bool:
        """Whether this step is a probe. Mutates.

        Args:
            watched: what probes may change; a change makes them frequent again.
        """
        if watched != self._watched:
            self._watched = watched
            self._interval, self._waited = self._settings.first_probe, 0
        self._waited += 1
        if self._waited < self._interval:
            return False
        self._waited = 0
        self._interval = min(2 * self._interval, self._settings.last_probe)
        return True

    def hurry(self) -> None:
        """The last probe was better than expected: look again soon. Mutates."""
        self._interval = self._settings.first_probe


class DriftAlarm:
    """Whether predictions and observations have parted. Owner: the block scheduler.

    Args:
        window: steps that are compared.
        tolerance: relative deviation of the sums that is too much.
    """

    def __init__(self, window: int = 256, tolerance: float = 0.2) -> None:
        self._window, self._tolerance = window, tolerance
        self._num_steps = 0
        self._predicted = self._observed = 0.0
        self.ratio = 1.0
        """Observed / predicted over the last full window."""

    def add(self, predicted: float, observed: float) -> bool:
        """Add one step; return whether a window has just ended that deviates too much. Mutates."""
        self._num_steps += 1
        self._predicted += predicted
        self._observed += observed
        if self._num_steps < self._window:
            return False
        self.ratio = self._observed / self._predicted if self._predicted > 0 else 1.0
        self._num_steps, self._predicted, self._observed = 0, 0.0, 0.0
        return abs(self.ratio - 1) > self._tolerance
