"""What a drafter says of draft tokens that it sampled: from which distributions.

Sampling by rejection corrects each draft by the probability that it had to be drafted, so the verifier needs
the very distribution. The drafter samples from few tokens, which keeps that small.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

MOST_PROPOSED = 64
"""Tokens of one slot that a drafter samples from."""


class Proposal(NamedTuple):
    """The distribution that one draft token was sampled from."""

    token_ids: Sequence[int]
    probabilities: Sequence[float]
    """Of these ids, in 32 bits; they add up to 1."""


def packed_proposals(proposals: Sequence[Proposal]) -> bytes:
    """Pack one row's proposals, 8 bytes per candidate."""
    parts: list[bytes] = []
    for token_ids, probabilities in proposals:
        parts += (
            array("I", [len(token_ids), *token_ids]).tobytes(),
            array("f", probabilities).tobytes(),
        )
    return b"".join(parts)


def unpacked_proposals(packed: bytes) -> list[Proposal]:
    """Return what ``packed_proposals`` packed."""
    numbers, chances = memoryview(packed).cast("I"), memoryview(packed).cast("f")
    found: list[Proposal] = []
    start = 0
    while start < len(numbers):
        middle = start + 1 + numbers[start]
        end = middle + numbers[start]
        ids, probabilities = numbers[start + 1 : middle], chances[middle:end]
        found.append(Proposal(ids.tolist(), probabilities.tolist()))
        start = end
    return found
