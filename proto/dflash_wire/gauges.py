"""What an engine group says of itself for metrics, once a second and not per request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class SchedulerGauges(NamedTuple):
    """One lane's block scheduler at one moment."""

    state: str
    num_switches: int
    """Changes of the draft width, probes not counted."""
    token_ratio: float
    """Committed tokens observed / predicted, when the drift alarm last compared them."""
    time_ratio: float
    """Step time, the same."""
    brier_score: float
    """Of predicted acceptance; NaN before the first trial."""
    survival: list[float]
    """Probability that the first 1, 2, ... draft tokens are all accepted, of a new request."""
    rows_by_width: list[int]
    """Index w: rows that verified w positions so far."""
    predicted_tokens: float = 0.0
    """Committed tokens that were predicted so far, of steps that speculated as decided."""
    observed_tokens: float = 0.0
    """Those that came."""


@dataclass(frozen=True, slots=True)
class GroupGauges:
    """One engine group at one moment, as its coordinator counts it."""

    group: str
    """Name of the coordinator replica; a replaced group has another one."""
    num_running: int
    num_waiting: int
    num_outstanding_tokens: int
    """Tokens to prefill and expected output of both (see ``gateway.coordinator.outstanding``)."""
    num_pages: int
    num_held_pages: int
    """Pages of running sequences; those that only the prefix cache knows are idle, not held."""
    num_idle_pages: int
    num_preemptions: int
    num_steps: int
    num_failed_steps: int
    schedulers: tuple[SchedulerGauges, ...] = ()
    """Per lane."""
    num_guided_tokens: int = 0
    """Committed under a grammar."""
    num_forced_tokens: int = 0
    """Those of them to which it left no alternative."""
    num_written_drafts: int = 0
    """Accepted drafts that grammars had put into the drafter's places."""


GUIDED_COUNTS = ("num_guided_tokens", "num_forced_tokens", "num_written_drafts")
