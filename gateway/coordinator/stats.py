"""What the coordinator counts, for health checks and metrics."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dflash_wire.records import Row, StepResult
from gateway.coordinator.commit import RowCommit


@dataclass(slots=True)
class AcceptanceCounters:
    """Monotonic totals of the cycles of one drafter, or of all together.

    Owner: as ``EngineCounters``. Acceptance length is ``num_cycle_tokens / num_cycles``, acceptance rate
    ``num_accepted_drafts / num_draft_tokens``.
    """

    num_cycles: int = 0
    num_cycle_tokens: int = 0
    """Output tokens committed by cycles."""
    num_draft_tokens: int = 0
    num_accepted_drafts: int = 0

    def count_cycle(self, commit: RowCommit) -> None:
        """Add one committed verify row. Mutates."""
        self.num_cycles += 1
        self.num_cycle_tokens += len(commit.token_ids)
        self.num_draft_tokens += commit.num_draft_tokens
        self.num_accepted_drafts += commit.num_accepted_drafts


@dataclass(slots=True)
class EngineCounters(AcceptanceCounters):
    """Monotonic totals since start.

    Owner: the coordinator; the driver thread alone mutates them, any thread may read.
    """

    num_steps: int = 0
    """Steps sent around the ring, failed ones included."""
    num_failed_steps: int = 0
    last_error: str | None = None
    num_finished: int = 0
    num_failed_requests: int = 0
    num_cancelled: int = 0
    num_committed_tokens: int = 0
    """Output tokens, those sampled by prefills included."""
    num_prefill_tokens: int = 0
    by_drafter: list[AcceptanceCounters] = field(default_factory=list)
    """Index i counts the cycles of sequences that drafter i drafts for; plain decoding is not in it."""
    accepted_drafts_by_position: list[int] = field(default_factory=list)
    """Index j counts cycles that committed more than j drafts."""
    plan_ms: float = 0.0
    ring_ms: float = 0.0
    """Time the driver waited for the ring; contains ``draft_ms`` and ``verify_ms``."""
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    commit_ms: float = 0.0
    """Committing a good step's result, publishing excepted."""

    def count_row(self, row: Row, commit: RowCommit, drafter: int | None) -> None:
        """Add one committed row of a sequence that ``drafter`` drafts for, if one does. Mutates."""
        self.num_committed_tokens += len(commit.token_ids)
        if row.is_prefill:
            self.num_prefill_tokens += row.num_positions
            return
        self.count_cycle(commit)
        if drafter is not None:
            self.by_drafter[drafter].count_cycle(commit)
        for position in range(commit.num_accepted_drafts):
            self.accepted_drafts_by_position[position] += 1

    def copy(self) -> EngineCounters:
        """Return a copy that later steps do not change."""
        return replace(
            self,
            by_drafter=[replace(counters) for counters in self.by_drafter],
            accepted_drafts_by_position=self.accepted_drafts_by_position.copy(),
        )

    def count_times(self, plan_ms: float, ring_ms: float, result: StepResult) -> None:
        """Add one good step's times, commit excepted."""
        self.plan_ms += plan_ms
        self.ring_ms += ring_ms
        self.draft_ms += result.draft_ms
        self.verify_ms += result.verify_ms


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine at one moment: gauges and a copy of the totals."""

    num_running: int
    num_waiting: int
    num_free_pages: int
    """Pages that a sequence could get, idle ones included."""
    num_idle_pages: int
    """Pages that only the prefix cache knows."""
    num_pages: int
    num_preemptions: int
    is_closed: bool
    totals: EngineCounters
