"""What one engine group has in front of it, as far as a router can know."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

REPORT_DELAY_S = 0.3
"""How old a report is when it arrives, about; calls sent since then are not in it."""
MAX_CALL_AGE_S = 3600.0
"""A call that was given up before it was sent is never reported as ended."""


@dataclass(slots=True)
class _Call:
    work: int
    sent_at: float
    is_reported: bool = False


class GroupLoad:
    """Outstanding tokens of one group: its last report, corrected by what this router did since.

    Owner: a ``GroupPicker``. Reports come about once a second and hold what all gateways sent. Between them
    a router counts its own calls: those that the report cannot know are added, those in the report that have
    ended are taken off.

    Invariants: ``_unreported`` is the work of the open calls that are not in the report.
    """

    def __init__(self) -> None:
        self._reported = 0.0
        self._unreported = 0
        self._ended = 0
        self._calls: dict[str, deque[_Call]] = {}

    @property
    def outstanding_tokens(self) -> float:
        """The estimate."""
        return max(self._reported - self._ended, 0.0) + self._unreported

    @property
    def num_calls(self) -> int:
        """Calls of this router that have not ended."""
        return sum(len(calls) for calls in self._calls.values())

    def begin(self, call_id: str, work: int, now: float) -> None:
        """A call goes to the group. Mutates.

        Args:
            call_id: calls of one HTTP request may share it.
            work: expected tokens.
            now: seconds.
        """
        self._calls.setdefault(call_id, deque()).append(_Call(work, now))
        self._unreported += work

    def end(self, call_id: str) -> None:
        """One call of this id has ended, however; unknown ids are fine. Mutates."""
        calls = self._calls.get(call_id)
        if calls is None:
            return
        call = calls.popleft()
        if not calls:
            del self._calls[call_id]
        if call.is_reported:
            self._ended += call.work
        else:
            self._unreported -= call.work

    def report(self, outstanding_tokens: float, now: float) -> None:
        """Take in what the group says of itself. Mutates."""
        self._reported, self._unreported, self._ended = outstanding_tokens, 0, 0
        for call_id, calls in list(self._calls.items()):
            while calls and now - calls[0].sent_at > MAX_CALL_AGE_S:
                calls.popleft()
            if not calls:
                del self._calls[call_id]
            for call in calls:
                call.is_reported = now - call.sent_at >= REPORT_DELAY_S
                if not call.is_reported:
                    self._unreported += call.work
