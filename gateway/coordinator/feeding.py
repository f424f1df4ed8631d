"""When the drafter takes in features: at once where it drafts, in batches where a sequence decodes plainly.

A batch costs little more than one position, and a step that feeds nobody goes straight to the verifier; so
keeping the drafter ready costs next to nothing while drafts do not pay.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_STEPS = 16
"""Features wait at most so many steps: more would save little, and the step that takes them in would last."""


@dataclass(slots=True)
class FeatureRoom:
    """Where steps write their features: the two halves of the FeaturePool, filled in turn, front to back.

    Owner: the planner; it alone mutates this. At most two steps are in flight, the one being planned among
    them. So when a step enters a half, all that lies there was written by steps that have landed, and what
    still waits there can be ingested by that same step, before it overwrites it.

    Args:
        half_size: rows of a half, at least those of any step.
    """

    half_size: int
    _half: int = 0
    _num_used: int = 0
    _num_steps: int = 0
    """Since all waiting features were taken in."""

    def place(self, num_features: int) -> tuple[int, bool]:
        """Return the first row for a step's features, and whether all that wait are due in it. Mutates."""
        self._num_steps += 1
        is_due = self._num_steps >= MOST_STEPS
        if self._num_used + num_features > self.half_size:
            self._half, self._num_used, is_due = 1 - self._half, 0, True
        if is_due:
            self._num_steps = 0
        first = self._half * self.half_size + self._num_used
        self._num_used += num_features
        return first, is_due
