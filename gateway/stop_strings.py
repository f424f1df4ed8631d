"""Finds stop strings in text that arrives in pieces, and never lets out a part of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text on until a stop string is complete. Owner: one sequence.

    The result depends on the text alone, not on how it is cut into pieces: the stop string that is
    complete first wins, and of several that end at the same character the longest.

    Invariant: what is held back is the longest end of the text that could begin a stop string.

    Args:
        keeps_match: let the completed stop string out as well.
    """

    def __init__(self, stop_strings: Sequence[str], keeps_match: bool = False) -> None:
        self._stop_strings = tuple(stop_strings)
        self._keeps_match = keeps_match
        self._held = ""
        self._num_exempt = 0
        """Characters of what is held back in which no stop string may end."""
        self.has_matched = False

    def push_exempt(self, text: str) -> str:
        """Return the text that can go out now. Stop strings that end in ``text`` do not count."""
        if self.has_matched or not self._stop_strings:
            return text
        text = self._held + text
        self._num_exempt = num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def push(self, text: str) -> str:
        """Return the text that can go out now; after a match that is never any more."""
        if self.has_matched or not text:
            return ""
        if not self._stop_strings:
            return text
        text = self._held + text
        match = self._find(text)
        if match is not None:
            self.has_matched = True
            self._held = ""
            return text[: match[0] if self._keeps_match else match[1]]
        split = len(text) - self._num_held(text)
        self._num_exempt = max(0, self._num_exempt - split)
        self._held = text[split:]
        return text[:split]

    def flush(self) -> str:
        """Return what is held back; the text ends here, so it begins no stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, int] | None:
        """Return where the first completed stop string ends and starts."""
        found = [
            (start + len(stop), start)
            for stop in self._stop_strings
            if (start := text.find(stop, max(0, self._num_exempt - len(stop) + 1))) >= 0
        ]
        return min(found, default=None)

    def _num_held(self, text: str) -> int:
        longest = max(len(stop) for stop in self._stop_strings) - 1
        for length in range(min(longest, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stop_strings):
                return length
        return 0
