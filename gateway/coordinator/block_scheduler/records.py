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

DEFAULT_TRAFFIC = ""
"""The class of requests that nothing is known of."""


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
    """Time since the landing before, None after a pause: nothing is learned of time then."""
