"""Where other threads leave work for the thread that drives the coordinator."""

from __future__ import annotations

import itertools
import threading
from typing import NamedTuple

from dflash_wire.errors import EngineUnavailableError, InvalidRequestError, OverloadedError
from gateway.coordinator.sequence import Sequence

SHUTTING_DOWN = "The engine is shutting down; try again shortly."


class InboxContent(NamedTuple):
    """What came in since the last ``take``."""

    arrived: list[Sequence]
    cancelled: list[Sequence]
    is_closed: bool


class Inbox:
    """Live request ids, new sequences and cancellations.

    Owner: itself; every thread may call every method, all state is behind one condition.

    Invariants: a request id is live from ``add`` until ``cancel`` or ``forget``; a cancelled
    sequence is handed to the driver exactly once; nothing is added after ``close``.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._condition = threading.Condition()
        self._seq_ids = itertools.count()
        self._live: dict[str, Sequence] = {}
        self._arrived: list[Sequence] = []
        self._cancelled: list[Sequence] = []
        self._is_closed = False

    @property
    def num_arrived(self) -> int:
        """Sequences the driver has not taken yet."""
        return len(self._arrived)

    @property
    def num_live(self) -> int:
        """Requests that have neither ended nor been cancelled."""
        return len(self._live)

    def outstanding_tokens(self, expected_output_tokens: int) -> int:
        """Expected work of the sequences the driver has not taken yet."""
        with self._condition:
            arrived = self._arrived.copy()
        return sum(s.outstanding_tokens(expected_output_tokens) for s in arrived)

    def add(self, sequence: Sequence, num_queued: int) -> None:
        """Take a sequence in and give it the next ``seq_id``. Mutates.

        Args:
            sequence: a new sequence.
            num_queued: sequences that wait behind the inbox already.

        Raises:
            InvalidRequestError: its request id is live.
            OverloadedError: too many wait.
            EngineUnavailableError: the coordinator was closed.
        """
        request_id = sequence.request.request_id
        with self._condition:
            if self._is_closed:
                raise EngineUnavailableError(SHUTTING_DOWN)
            if request_id in self._live:
                raise InvalidRequestError(
                    f"A request with id {request_id!r} is running; use another id."
                )
            if len(self._arrived) + num_queued >= self._max_waiting:
                raise OverloadedError(
                    f"{self._max_waiting} requests are waiting already; try again later."
                )
            sequence.seq_id = next(self._seq_ids)
            self._live[request_id] = sequence
            self._arrived.append(sequence)
            self._condition.notify_all()

    def cancel(self, request_id: str) -> None:
        """Mark a live request as cancelled; unknown and ended ids are ignored. Mutates."""
        with self._condition:
            sequence = self._live.pop(request_id, None)
            if sequence is not None:
                sequence.is_cancelled = True
                self._cancelled.append(sequence)

    def close(self) -> None:
        """Refuse new requests from now on and wake the driver. Mutates."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def forget(self, sequence: Sequence) -> None:
        """Free the request id of a sequence that ended. Mutates."""
        request_id = sequence.request.request_id
        with self._condition:
            # A cancelled id may be live again under a newer sequence.
            if self._live.get(request_id) is sequence:
                del self._live[request_id]

    def evict_all(self) -> list[Sequence]:
        """Forget every live sequence, taken or not, and return them oldest first. Mutates."""
        with self._condition:
            evicted = list(self._live.values())
            self._live, self._arrived, self._cancelled = {}, [], []
            return evicted

    def take(self) -> InboxContent:
        """Return what came in and empty the inbox. Mutates; never blocks."""
        with self._condition:
            content = InboxContent(self._arrived, self._cancelled, self._is_closed)
            self._arrived, self._cancelled = [], []
            return content

    def wait(self) -> None:
        """Block until a sequence arrived or the inbox is closed.

        Cancellations wake nobody: a driver whose sequences may be cancelled is not waiting.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._arrived or self._is_closed)
