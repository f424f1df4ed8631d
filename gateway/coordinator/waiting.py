"""The waiting queue: by priority, then by arrival, and nobody waits for ever."""

from __future__ import annotations

from bisect import insort
from contextlib import suppress

from gateway.coordinator.sequence import Sequence

MAX_OVERTAKES = 64
"""So many younger sequences may be admitted before an older one; then it goes first."""


class WaitingQueue:
    """Sequences without pages, preempted ones included, in the order in which they will be admitted.

    Owner: the planner; the driver thread alone mutates it.

    Invariant: sorted by ``Sequence.rank``.
    """

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def copy(self) -> list[Sequence]:
        """All of them in order; any thread may ask."""
        return self._sequences.copy()

    @property
    def head(self) -> Sequence:
        """Who is next; the queue is not empty."""
        return self._sequences[0]

    def add(self, sequence: Sequence) -> None:
        """Queue a new or a preempted sequence at its place. Mutates."""
        insort(self._sequences, sequence, key=lambda s: s.rank)

    def take(self) -> Sequence:
        """Remove and return the head; whoever was overtaken by it comes nearer. Mutates."""
        taken = self._sequences.pop(0)
        for sequence in [s for s in self._sequences if s.seq_id < taken.seq_id]:
            sequence.num_overtakes += 1
            if sequence.num_overtakes == MAX_OVERTAKES:
                self.remove(sequence)
                sequence.is_urgent = True
                self.add(sequence)
        return taken

    def remove(self, sequence: Sequence) -> None:
        """Drop a sequence if it is here. Mutates."""
        with suppress(ValueError):
            self._sequences.remove(sequence)

    def clear(self) -> None:
        """Drop all. Mutates."""
        self._sequences.clear()
