"""One step in flight or two: whichever served steps faster, as measured.

With two, the drafter works on one half of the sequences while the verifier works on the other. That hides
draft passes and transport, and costs a second target pass over half as many rows each: it pays where passes
are dominated by their rows, or where drafting takes long, and never when one CPU has to do both.
"""

from __future__ import annotations

WARM_UP_STEPS = 2
"""Steps after a change that may still belong to the old choice."""
WINDOW_STEPS = 16
"""Steps over which a choice is measured before the next one."""
PROBE_EVERY = 64
"""Windows after which the slower choice is measured again."""
SMOOTHING = 0.3
"""Weight of the newest window."""
MIN_GAIN = 0.03
"""Two cohorts must be faster by this share: they are less regular."""


class Comparison:
    """What one load gave with one cohort and with two.

    Owner: the chooser.
    """

    def __init__(self) -> None:
        self._ms_per_position: dict[int, float] = {}
        self._num_windows = 0

    def add(self, num_cohorts: int, ms_per_position: float) -> None:
        """Add one window. Mutates."""
        old = self._ms_per_position.get(num_cohorts, ms_per_position)
        self._ms_per_position[num_cohorts] = old + SMOOTHING * (ms_per_position - old)
        self._num_windows += 1

    def next_choice(self) -> int:
        """What is to run next: what has not been measured, the slower one when it is time, or the faster."""
        for num_cohorts in (1, 2):
            if num_cohorts not in self._ms_per_position:
                return num_cohorts
        one, two = self._ms_per_position[1], self._ms_per_position[2]
        best = 2 if two < one * (1 - MIN_GAIN) else 1
        return 3 - best if self._num_windows % PROBE_EVERY == 0 else best


class CohortChooser:
    """Chooses the number of cohorts by load. Owner: the coordinator; the driver thread alone calls it.

    Loads are told apart by the power of two that their running sequences do not exceed. In each, windows of
    steps measure the time per packed target position, first with one cohort, then with two; from then on the
    faster one runs and the other is tried again from time to time.

    Args:
        allowed: ``(1,)``, ``(2,)``, or ``(1, 2)`` to compare them.
    """

    def __init__(self, allowed: tuple[int, ...]) -> None:
        self._allowed = allowed
        self._comparisons: dict[int, Comparison] = {}
        self._load = 0
        self._num_steps = 0
        self._num_positions = 0
        self._began = 0.0
        self.num_cohorts = allowed[0]
        """Steps that may be in flight now."""

    def choose(self, num_sequences: int) -> int:
        """Return how many steps may be in flight. Mutates when the load has changed or a window is full.

        Args:
            num_sequences: running now.
        """
        # 2**k is the largest of its load: a full engine, where one ends and the next begins, stays in one.
        load = max(num_sequences - 1, 0).bit_length()
        if load != self._load or self._num_steps >= WARM_UP_STEPS + WINDOW_STEPS:
            self._load = load
            self.pause()
            # A single sequence cannot be in two steps.
            can_compare = len(self._allowed) > 1 and num_sequences > 1
            self.num_cohorts = self._comparison().next_choice() if can_compare else self._allowed[0]
        return self.num_cohorts

    def count(self, num_positions: int, landed_s: float) -> None:
        """A step has landed. Mutates.

        Args:
            num_positions: packed target positions of the step.
            landed_s: when it came back, in seconds of one clock.
        """
        self._num_steps += 1
        if self._num_steps == WARM_UP_STEPS:
            self._began = landed_s
        elif self._num_steps > WARM_UP_STEPS:
            self._num_positions += num_positions
        if self._num_steps == WARM_UP_STEPS + WINDOW_STEPS:
            elapsed_ms = 1e3 * (landed_s - self._began)
            self._comparison().add(self.num_cohorts, elapsed_ms / self._num_positions)

    def pause(self) -> None:
        """Begin a new window: the one in progress would measure a wait, or a mixture. Mutates."""
        self._num_steps = self._num_positions = 0

    def _comparison(self) -> Comparison:
        return self._comparisons.setdefault(self._load, Comparison())
