"""How much of a text must wait, because a marker may begin there."""

from __future__ import annotations

WHITESPACE = " \t\r\n"


def num_held(text: str, marker: str) -> int:
    """Return the length of the longest end of ``text`` that begins ``marker`` but is not all of it."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


def split_held(text: str, marker: str) -> tuple[str, str]:
    """Return what can go out, and what waits: an end that may begin ``marker``, and the whitespace before it.

    Whitespace waits even when nothing of the marker is there: if the marker follows, it is not needed.
    """
    cut = len(text) - num_held(text, marker)
    cut = len(text[:cut].rstrip(WHITESPACE))
    return text[:cut], text[cut:]
