"""Stamps: a clock reading in the text of a stream, so that a client sees how long an event took.

Microseconds modulo 2^24 (16.8 s), three bytes, base64: four characters, one token each. The engine of
``make bench-gateway`` writes the same. Both ends must share a machine's monotonic clock.
"""

from __future__ import annotations

import base64

FIRST_TEXT = "."
"""A stream's first text, which carries no stamp."""
TOKENS_PER_STAMP = 4
_NUM_BYTES = 3
_WRAP_US = 1 << (8 * _NUM_BYTES)


def stamp(clock_s: float) -> str:
    """Return a reading of ``time.perf_counter`` as four characters."""
    microseconds = int(clock_s * 1e6) % _WRAP_US
    return base64.b64encode(microseconds.to_bytes(_NUM_BYTES, "big")).decode()


def age_s(text: str, clock_s: float) -> float:
    """Return the seconds from a stamp to ``clock_s``, at most 16.8.

    Raises:
        ValueError: ``text`` is no stamp.
    """
    raw = base64.b64decode(text, validate=True)
    if len(raw) != _NUM_BYTES:
        raise ValueError(f"{text!r} is no stamp")
    return ((int(clock_s * 1e6) - int.from_bytes(raw, "big")) % _WRAP_US) * 1e-6
