"""One step in flight or two: whichever served tokens faster, as measured.

With two, the drafter works on one half of the sequences while the verifier works on the other. That hides
draft passes and transport, and costs a second target pass over half as many rows each: it pays where passes
are dominated by their rows, or where drafting takes long, and never when one CPU has to do both.
"""

from __future__ import annotations

from gateway.coordinator.block_scheduler.records import load_of

WARM_UP_STEPS = 2
"""Steps after a change that may still belong to the old choice."""
WINDOW_STEPS = 64
"""Steps over which a choice is measured before the next one: what they commit is a matter of luck, too."""
PROBE_EVERY = 64
"""Windows after which the slower choice is measured again; and after 4, 8, 16 and 32, as each first window
may have been a lucky one."""
LEAST_WEIGHT = 0.2
"""Weight of the newest window; the first ones weigh alike."""
MIN_GAIN = 0.03
"""Two cohorts must be faster by this share: they are less regular."""


class Comparison:
    """What one load gave with one cohort and with two.

    Owner: the chooser.

    Args:
        allowed: numbers of cohorts to compare.
    """

    def __init__(self, allowed: tuple[int, ...]) -> None:
        self._ms_per_token = dict.fromkeys(allowed, 0.0)
        self._num_windows = dict.fromkeys(allowed, 0)
        self._num_steps = self._num_tokens = 0
        self._window_ms = 0.0
        self.choice = allowed[0]
        """What is to run: what has not been measured, the slower one when it is time, or the faster."""

    def add(self, num_tokens: int, step_ms: float) -> bool:
        """Add one step of the present choice; return whether a window is full. Mutates."""
        self._num_steps += 1
        self._num_tokens += num_tokens
        self._window_ms += step_ms
        if self._num_steps < WINDOW_STEPS:
            return False
        self._num_windows[self.choice] += 1
        weight = max(LEAST_WEIGHT, 1 / self._num_windows[self.choice])
        ms_per_token = self._window_ms / max(1, self._num_tokens)
        self._ms_per_token[self.choice] += weight * (ms_per_token - self._ms_per_token[self.choice])
        self._num_steps, self._num_tokens, self._window_ms = 0, 0, 0.0
        self.choice = self._next_choice()
        return True

    def _next_choice(self) -> int:
        for num_cohorts, num_windows in self._num_windows.items():
            if num_windows == 0:
                return num_cohorts
        if len(self._num_windows) == 1:
            return self.choice
        best = 2 if self._ms_per_token[2] < self._ms_per_token[1] * (1 - MIN_GAIN) else 1
        return 3 - best if self._is_probed(sum(self._num_windows.values())) else best

    @staticmethod
    def _is_probed(num_windows: int) -> bool:
        is_early = 4 <= num_windows < PROBE_EVERY and num_windows.bit_count() == 1
        return is_early or num_windows % PROBE_EVERY == 0


class CohortChooser:
    """Chooses the number of cohorts by load. Owner: the coordinator; the driver thread alone calls it.

    Loads are told apart by the power of two that their running sequences do not exceed. In each, windows of
    steps measure the time per committed token, first with one cohort, then with two; from then on the
    faster one runs and the other is tried again from time to time. Not per verified position: the widths that
    the block scheduler chooses differ between the two, and wide ones cost less per position than they bring.

    Args:
        allowed: ``(1,)``, ``(2,)``, or ``(1, 2)`` to compare them.
    """

    def __init__(self, allowed: tuple[int, ...]) -> None:
        self._allowed = allowed
        self._comparisons: dict[int, Comparison] = {}
        self._load = self._num_steps = 0
        self._landed_s = 0.0
        self.num_cohorts = allowed[0]
        """Steps that may be in flight now."""

    def choose(self, num_sequences: int) -> int:
        """Return how many steps may be in flight. Mutates when the load has changed or a window was full.

        Args:
            num_sequences: running now.
        """
        load = load_of(num_sequences)
        if load != self._load:
            self._load = load
            self.pause()
        # A single sequence cannot be in two steps.
        choice = self._comparison().choice if num_sequences > 1 else self._allowed[0]
        if choice != self.num_cohorts:
            self.num_cohorts = choice
            self.pause()
        return choice

    def count(self, num_tokens: int, landed_s: float) -> None:
        """A step has landed. Mutates.

        Args:
            num_tokens: committed by the step.
            landed_s: when it came back, in seconds of one clock.
        """
        before, self._landed_s = self._landed_s, landed_s
        self._num_steps += 1
        comparison = self._comparison()
        is_fair = self._num_steps > WARM_UP_STEPS and comparison.choice == self.num_cohorts
        if is_fair and comparison.add(num_tokens, 1e3 * (landed_s - before)):
            self.pause()

    def pause(self) -> None:
        """What lands next would measure a wait, or a mixture."""
        self._num_steps = 0

    def _comparison(self) -> Comparison:
        return self._comparisons.setdefault(self._load, Comparison(self._allowed))
