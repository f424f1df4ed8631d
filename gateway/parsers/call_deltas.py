"""From a call that is being read to deltas, and how many calls there were; the same for every format."""

from __future__ import annotations

from gateway.parsers.deltas import CallArguments, CallStart, Delta, new_call_id
from gateway.parsers.json_call import JsonCall


class CallDeltas:
    """Tells the calls of one sequence, numbered as they begin. Owner: a parser."""

    def __init__(self) -> None:
        self.num_calls = 0
        """Calls that have begun."""
        self.num_complete_calls = 0

    def _feed(self, call: JsonCall, text: str, deltas: list[Delta]) -> tuple[str, bool]:
        """Give ``text`` to ``call`` and append what it says; return what is left, and whether it is over.

        A call that fails after it has started is over; one that fails before never was one. Mutates.
        """
        had_started = call.has_started
        rest = text[call.push(text) :]
        if call.has_started and not had_started:
            deltas.append(CallStart(self.num_calls, new_call_id(), str(call.name)))
            self.num_calls += 1
        if arguments := call.take_arguments():
            deltas.append(CallArguments(self.num_calls - 1, arguments))
        is_over = call.is_done or (call.has_failed and call.has_started)
        self.num_complete_calls += is_over
        return rest, is_over
