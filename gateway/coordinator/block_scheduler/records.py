"""What the block scheduler is told and what it answers.

A width counts the anchor: width ``w`` verifies ``w`` positions, ``w - 1`` of them draft tokens. A *draft
width* is the block that the drafter fills, one for all rows of a step; a *verify width* is how much of it a
row has verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

TREES = 1000
"""Where draft widths are compared, one so much beyond a block's width stands for trees out of such blocks."""

DEFAULT_TRAFFIC = ""
"""The class of requests that nothing is known of."""


def block_width(draft_width: int) -> int:
    """Return the block that the drafter fills for what is compared as a draft width."""
    return draft_width - TREES if draft_width > TREES else draft_width


def load_of(num_rows: int) -> int:
    """Return what tells loads apart: a power of two of rows goes with those below it.

    So many streams have a row fewer whenever one ends.
    """
    return max(num_rows - 1, 0).bit_length()


def shape_name(draft_width: int) -> str:
    """Say in words what is compared as a draft width."""
    what = "trees of blocks of" if draft_width > TREES else "draft width"
    return f"{what} {block_width(draft_width)}"


class RowState(NamedTuple):
    """One decoding sequence whose width is to be chosen."""

    seq_id: int
    traffic: str
    """Requests of one class are expected to be drafted alike: a tag, a drafter, a temperature bucket."""
    max_width: int
    """At least 1; what its remaining tokens and the drafter allow."""
    context: int
    """Committed tokens."""


class StepLoad(NamedTuple):
    """What the step holds besides the rows to decide on."""

    num_fixed_rows: int = 0
    """Verify rows whose policy has fixed their width."""
    num_fixed_positions: int = 0
    """Their positions."""
    fixed_context: int = 0
    """Their committed tokens."""
    fixed_draft_width: int = 1
    """The widest of them."""
    num_prefill_positions: int = 0
    num_cohorts: int = 1
    max_positions: int = 1 << 30
    """Most verify positions that the rows to decide on may have together; at least one each."""
    allows_trees: bool = False
    """All rows to decide on have one drafter, nobody asked for chains, and their features have room."""


class TreeShare(NamedTuple):
    """How the nodes of a step's trees are to be shared out (see ``dflash_wire.trees.NodeBudget``)."""

    draft_width: int
    """What stands for these trees where draft widths are compared (see ``TREES``)."""
    most_width: int
    """Positions of a row at most."""
    num_nodes: list[int]
    step_ms: list[float]
    acceptance: dict[str, list[float]]
    """By class."""
    expected_tokens: float
    """What the mean curve expects of the planned number of nodes."""
    expected_ms: float
    """The price of that number."""


class Decision(NamedTuple):
    """The widths of one step."""

    decision_id: int
    draft_width: int
    """1: nobody drafts."""
    widths: list[int]
    """Verify width per row, in the order asked; none wider than ``draft_width`` or its ``max_width``."""
    predicted_tokens: float
    """Expected committed tokens of these rows."""
    predicted_ms: float
    """Expected time from this step's landing to the next one's."""
    state: str
    """One of the scheduler's states, for metrics."""
    reason: str
    """In words, for the decision log."""
    tree: TreeShare | None = None
    """Rows wider than 1 draft trees, whose nodes the drafter shares out; ``widths`` are what is expected."""


class RowOutcome(NamedTuple):
    """What one verify row gave.

    ``num_trials`` counts the draft positions that had a fair trial: those up to and with the first rejected
    one. Positions behind a stop token, the length limit or a grammar's cut had none, and count neither as
    accepted nor as rejected.
    """

    seq_id: int
    traffic: str
    draft_width: int
    num_trials: int
    num_accepted: int
    """At most ``num_trials``."""
    num_verified: int = 0
    """Tokens that the verifier committed, before a stop token or a limit cut them; 0: none was cut."""
    width: int = 0
    """Verified positions, anchor included; 0: all that were drafted."""


class TreeRowOutcome(NamedTuple):
    """What one tree row gave."""

    seq_id: int
    traffic: str
    block_width: int
    """What the drafter filled."""
    num_nodes: int
    """Draft tokens verified."""
    accepted_nodes: list[int]
    """Indices of those on the target's path, ascending."""
    scores: bytes
    """Path scores of all nodes that the drafter made (``dflash_wire.trees.packed_scores``), best first."""
    num_verified: int
    """Tokens that the verifier committed, before a stop token or a limit cut them."""
    is_cut: bool
    """A stop token came among them: what was accepted behind it is nobody's text."""
    chain_trials: int = 0
    """The likeliest tokens of the slots, as far as they had a trial in a row."""
    chain_hits: int = 0

    @property
    def as_chain(self) -> RowOutcome:
        """What the tree says of chains out of such blocks."""
        trials, hits = (0, 0) if self.is_cut else (self.chain_trials, self.chain_hits)
        return RowOutcome(self.seq_id, self.traffic, self.block_width, trials, hits)


class StepOutcome(NamedTuple):
    """What one landed step gave.

    Owner: whoever builds it; the scheduler only reads.
    """

    decision: Decision | None
    """None when every row's policy had fixed its width."""
    rows: Sequence[RowOutcome]
    num_rows: int
    """Verify rows, fixed ones included."""
    num_positions: int
    """Packed target positions, prefill included."""
    num_prefill_positions: int
    context: int
    """Committed tokens of all verify rows."""
    num_cohorts: int
    draft_width: int
    """Widest block drafted in the step; 1 without any."""
    draft_ms: float
    verify_ms: float
    step_ms: float | None
    """Time since the landing before, None after a pause: nothing is learned of time then, nor where a coarse
    clock saw none pass."""
    trees: Sequence[TreeRowOutcome] = ()
    """Rows that drafted trees; ``rows`` are the others."""
