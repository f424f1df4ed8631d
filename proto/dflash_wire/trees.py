"""What is said of draft trees: what they may cost, from the coordinator to the drafter, and what became of
them on the way back."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

NUM_SCORE_BINS = 33
"""Path scores at which a map from scores to probabilities is given."""
LEAST_BIN_SCORE = -8.0
"""The lowest of them; the others follow evenly up to 0."""


class NodeBudget(NamedTuple):
    """What the trees of a step may have together, to be shared out when their nodes are known.

    The drafter takes the nodes that are most likely to be accepted, over all rows that share, and as many of
    them as give most expected committed tokens per millisecond.
    """

    sharing: list[int]
    """Per row of the plan: which map of ``acceptance`` is the row's; -1: it does not share. Rows behind the
    last one given do not either."""
    num_nodes: list[int]
    """Ascending; numbers of nodes of all rows together, to choose from."""
    step_ms: list[float]
    """What the step takes with so many."""
    acceptance: list[list[float]]
    """``[maps][NUM_SCORE_BINS]`` probabilities that a node is accepted, rising with its score."""

    def map_of(self, row: int) -> int:
        """Which map of ``acceptance`` is a row's; -1: it does not share."""
        return self.sharing[row] if row < len(self.sharing) else -1

    @property
    def most_nodes(self) -> int:
        """Nodes that the step holds at most."""
        return self.num_nodes[-1]


class TreeOutcome(NamedTuple):
    """What a tree row was and which of its nodes the target chose."""

    num_nodes: int
    """Draft tokens verified, at most ``width - 1``."""
    accepted_nodes: list[int]
    """Indices (0-based) of the accepted drafts among all, ascending: a path from the anchor."""
    scores: bytes
    """Of all nodes that the drafter made (see ``packed_scores``), verified or not; empty if it gave none."""
    chain_trials: int = 0
    """The chain of likeliest tokens within the tree: its tokens up to and with the first rejected one."""
    chain_hits: int = 0
    """Those of them that were accepted."""


LEAST_SCORE = -60000.0
"""Scores below are as good as this one; half precision ends a little behind it."""


def packed_scores(scores: Sequence[float]) -> bytes:
    """Pack what a drafter gives the nodes of a tree: path log-probabilities, best first, as 16-bit floats."""
    return struct.pack(f"<{len(scores)}e", *[max(score, LEAST_SCORE) for score in scores])


def unpacked_scores(packed: bytes) -> tuple[float, ...]:
    """Return what ``packed_scores`` packed, rounded."""
    return struct.unpack(f"<{len(packed) // 2}e", packed)
