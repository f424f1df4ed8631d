"""The step loop: take requests, plan, send around the ring, commit, publish."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from dflash_wire.errors import (
    DFlashError,
    EngineUnavailableError,
    ExecutorsReplacedError,
    FatalError,
    error_from_wire,
    error_to_wire,
)
from dflash_wire.ports import EngineLimits, StepRing, TokenSink
from dflash_wire.records import (
    CycleStats,
    GenerationRequest,
    StepRecord,
    StepResult,
    TokenChunk,
)
from gateway.coordinator.block_scheduler.build import build_scheduler
from gateway.coordinator.block_scheduler.scheduler import BlockScheduler
from gateway.coordinator.cohorts import CohortChooser
from gateway.coordinator.commit import (
    RowCommit,
    RowResult,
    check_result,
    commit_row,
    cycle_stats,
    row_results,
)
from gateway.coordinator.feedback import StepClock, step_outcome
from gateway.coordinator.inbox import SHUTTING_DOWN, Inbox
from gateway.coordinator.learning import Learning
from gateway.coordinator.outbox import Outbox, engine_error, introduce
from gateway.coordinator.planner import Planner
from gateway.coordinator.recorder import Flight, FlightRecorder, cycle_began, step_record
from gateway.coordinator.sequence import LastCycle, Sequence
from gateway.coordinator.stats import AcceptanceCounters, EngineCounters, EngineSnapshot
from gateway.coordinator.validation import check_engine, check_request, choose_drafter

logger = logging.getLogger(__name__)

DEFAULT_MAX_WAITING = 1024


class Coordinator:
    """Owns the truth about every sequence of one engine group.

    Owner: whoever built it. One thread at a time drives it (``step``, ``run_forever``); any thread
    may call ``submit``, ``cancel``, ``close`` and ``snapshot``. The ring and the sink are called by
    the driver only.

    Every request ends in exactly one last chunk (a finish reason or an error); a cancelled one gets none.
    Executors are caches: after a failed step no pool is trusted, and surviving sequences prefill again.

    Args:
        ring: the way to drafter and verifier.
        sink: where committed tokens go.
        limits: what the engine can hold.
        default_policy: block policy of requests that name none.
        clock: monotonic seconds.
        max_waiting: sequences that may wait for admission.
        caches_prefixes: share full pages between sequences that begin alike.
        cohorts: steps that may be in flight: ``(1,)``, ``(2,)``, or ``(1, 2)`` for the faster, as measured.
        scheduler: of the policies ``adaptive`` and ``table``; None for one that knows no prices yet.

    Raises:
        ConfigError: the limits or the default policy cannot work.
    """

    def __init__(
        self,
        ring: StepRing,
        sink: TokenSink,
        limits: EngineLimits,
        default_policy: str,
        clock: Callable[[], float] = time.perf_counter,
        max_waiting: int = DEFAULT_MAX_WAITING,
        caches_prefixes: bool = True,
        cohorts: tuple[int, ...] = (1, 2),
        scheduler: BlockScheduler | None = None,
    ) -> None:
        check_engine(limits, max_waiting, default_policy)
        self._ring = ring
        self._limits = limits
        self._default_policy = default_policy
        self._clock = clock
        self._inbox = Inbox(max_waiting)
        self.learning = Learning(scheduler or build_scheduler(limits.max_draft_block_size))
        self._step_clock = StepClock()
        self._planner = Planner(limits, self.learning, caches_prefixes)
        self._counters = EngineCounters(
            accepted_drafts_by_position=[0] * (limits.max_draft_block_size - 1),
            by_drafter=[AcceptanceCounters() for _ in limits.all_drafters],
        )
        self._outbox = Outbox(sink)
        self._flights: deque[Flight] = deque()
        self._cohorts = CohortChooser(cohorts)
        self._recorder = FlightRecorder()
        self._has_shut_down = False

    # ----- any thread ---------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; its tokens will be published until its last chunk.

        Raises:
            ClientError: a field is wrong (``InvalidRequestError``), or it does not fit
                (``ContextLengthError``).
            OverloadedError: too many requests wait.
            EngineUnavailableError: the coordinator was closed.
        """
        self.enqueue(self.prepare(request))

    def prepare(self, request: GenerationRequest) -> Sequence:
        """Return a checked request's sequence, for this coordinator or another with the same limits.

        Raises:
            ClientError: as ``submit``.
        """
        max_length = check_request(request, self._limits)
        drafter, policy = choose_drafter(request, self._default_policy, self._limits)
        return Sequence(request, max_length, policy, self._limits.page_size, drafter)

    def set_policy(self, policy: str) -> None:
        """Change the default policy, for running requests that named none too (see ``WidthChooser``).

        Raises:
            InvalidRequestError: no such policy, or a drafter cannot follow it.
        """
        self._planner.widths.set_default(policy)
        self._default_policy = policy

    def enqueue(self, sequence: Sequence) -> None:
        """Queue what ``prepare`` made, once.

        Raises:
            InvalidRequestError: a request of its id is live.
            OverloadedError: too many requests wait.
            EngineUnavailableError: the coordinator was closed.
        """
        self._inbox.add(sequence, self._planner.num_waiting)

    def num_cached_pages(self, sequence: Sequence) -> int:
        """How many cached pages a prepared sequence would share if it began now: a hint."""
        return len(self._planner.cached_pages(sequence))

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return self._inbox.num_live

    def cancel(self, request_id: str) -> None:
        """End a request silently; its pages are free before the next plan. Unknown ids are fine.

        The id may be used again at once. A chunk the sink is being given right now still goes out.
        """
        self._inbox.cancel(request_id)

    def close(self) -> None:
        """Refuse new requests; the driver's next ``step`` ends the live ones with an error.

        To drain, wait until a ``snapshot`` shows nothing running or waiting, then close.
        """
        self._inbox.close()

    def snapshot(self) -> EngineSnapshot:
        """Return gauges and totals; between two steps of the driver they are exact."""
        return EngineSnapshot(
            num_running=self._planner.num_running,
            num_waiting=self._planner.num_waiting + self._inbox.num_arrived,
            num_free_pages=self._planner.pages.num_free,
            num_idle_pages=self._planner.pages.num_idle,
            num_pages=self._planner.pages.num_pages,
            num_preemptions=self._planner.num_preemptions,
            is_closed=self._has_shut_down,
            totals=self._counters.copy(),
        )

    def recorded_steps(self) -> list[StepRecord]:
        """Return when what happened in the latest good steps, oldest first."""
        return self._recorder.copy()

    def outstanding_tokens(self, expected_output_tokens: int) -> int:
        """Return the expected work of all live sequences in tokens (see ``outstanding``)."""
        parts = (self._inbox, self._planner)
        return sum(part.outstanding_tokens(expected_output_tokens) for part in parts)

    def check_integrity(self) -> None:
        """Check the page tables; for tests and debugging, between steps.

        Raises:
            RuntimeError: a page is lost or has two owners.
        """
        self._planner.pages.check_integrity()

    # ----- driver thread ------------------------------------------------------------------------

    def run_forever(self) -> None:
        """Step while there is work and sleep while there is none; return after ``close``."""
        while True:
            if self.step():
                continue
            if self._has_shut_down:
                return
            self._inbox.wait()

    def step(self) -> bool:
        """Send what can be sent, then land one step.

        Returns:
            False when there was nothing to run, or the coordinator is closed.
        """
        try:
            return self._step()
        except Exception as error:
            # Not one request's fault, so no one's state can be trusted: end all, serve the next.
            logger.exception("the step loop failed; ending all requests")
            self._counters.last_error = str(error_to_wire(error)["message"])
            self._end_all(error)
            return True

    def _step(self) -> bool:
        while True:
            started = self._clock()
            is_closed = self._take_inbox()
            if is_closed and not self._flights:
                self._end_all(EngineUnavailableError(SHUTTING_DOWN))
                self._has_shut_down = True
                self.learning.close()
                return False
            if is_closed or not self._send_next(started):
                break
        self.learning.start()
        if not self._flights and self._outbox.is_empty:
            self._cohorts.pause()
            self._step_clock.pause()
            return False
        landed = self._land(self._flights[0]) if self._flights else None
        self._publish()
        if landed is not None:
            self._recorder.add(step_record(*landed, self._clock()))
        return True

    def _take_inbox(self) -> bool:
        """Apply what other threads asked for; return whether the coordinator was closed."""
        arrived, cancelled, is_closed = self._inbox.take()
        for sequence in arrived:
            self._planner.enqueue(sequence)
        for sequence in cancelled:
            self._planner.remove(sequence)
        self._counters.num_cancelled += len(cancelled)
        return is_closed

    def _send_next(self, started: float) -> bool:
        """Plan a step and send it, if one may be sent; return whether another may be now."""
        if not self._planner.has_work:
            return False
        num_cohorts = self._cohorts.choose(self._planner.num_running)
        is_full = len(self._flights) >= num_cohorts or self._planner.is_short_of_pages
        if self._flights and is_full:
            return False
        planned = self._planner.plan(self._counters.num_steps, num_cohorts, len(self._flights))
        for sequence, error in planned.failures:
            self._end_with_error(sequence, error, "cannot be planned")
        if not planned.plan.rows:
            return False
        self._counters.num_steps += 1
        self._flights.append(flight := Flight(planned, started, self._clock()))
        try:
            self._ring.send(planned.plan)
        except Exception as error:
            self._fail_step(flight, error)
            # Nobody has ended then, and what was to go still is: plan it for the new executors.
            return isinstance(error, ExecutorsReplacedError)
        return True

    def _land(self, flight: Flight) -> tuple[Flight, StepResult, float] | None:
        """Wait for the oldest step in flight and commit it; return it with the time it was back."""
        plan = flight.planned.plan
        try:
            result = self._ring.receive(plan.step_id)
            if result.error is not None:
                raise error_from_wire(result.error)
            check_result(plan, result)
        except Exception as error:
            self._fail_step(flight, error)
            return None
        landed = self._clock()
        self._flights.popleft()
        self._planner.land(flight.planned)
        self._counters.count_times(
            1e3 * (flight.sent - flight.started), 1e3 * (landed - flight.sent), result
        )
        self._cohorts.count(sum(map(len, result.committed_token_ids)), landed)
        step_ms = self._step_clock.landed(landed, plan.num_cohorts)
        self._commit(flight, result, step_ms)
        self._counters.commit_ms += 1e3 * (self._clock() - landed)
        return flight, result, landed

    def _commit(self, flight: Flight, result: StepResult, step_ms: float | None) -> None:
        """Commit all rows, then take the time: their cycles carry all of it; then emit."""
        planned, plan = flight.planned, flight.planned.plan
        commits: list[tuple[Sequence, RowResult, RowCommit]] = []
        for sequence, row_result in zip(planned.sequences, row_results(plan, result), strict=True):
            try:
                # One that was cancelled while it was in flight has given up its pages.
                if self._planner.is_running(sequence):
                    commit = commit_row(sequence, row_result)
                    self._counters.count_row(row_result.row, commit, sequence.context)
                    self._planner.keep_prefix(sequence, commit.num_shareable)
                    commits.append((sequence, row_result, commit))
            except Exception as error:
                self._end_with_error(sequence, error, "cannot commit")
        # Before sequences end: the scheduler forgets them then.
        self.learning.add(partial(step_outcome, planned, commits, result, step_ms))
        committed_at = self._clock()
        for sequence, row_result, commit in commits:
            cycle = None
            if not row_result.row.is_prefill:
                wall_ms = 1e3 * (committed_at - cycle_began(sequence, flight))
                cycle = cycle_stats(commit, result, wall_ms)
                sequence.stats.add(cycle)
                sequence.last_cycle = LastCycle(plan.step_id, committed_at)
            self._emit(sequence, commit, cycle)

    def _emit(self, sequence: Sequence, commit: RowCommit, cycle: CycleStats | None) -> None:
        if not commit.token_ids:
            return
        chunk = TokenChunk(sequence.request.request_id, commit.token_ids, cycle=cycle)
        chunk.logprobs = commit.logprobs
        chunk.num_before = sequence.num_output - len(commit.token_ids)
        if chunk.num_before == 0:
            introduce(chunk, sequence, self._planner.widths.policy_of(sequence).name)
        if commit.finish_reason is not None:
            chunk.finish_reason = commit.finish_reason.value
            self._counters.num_finished += 1
            self._end(sequence)
        self._outbox.add(sequence, chunk)

    def _end(self, sequence: Sequence) -> None:
        self._planner.remove(sequence)
        self._inbox.forget(sequence)

    def _end_with_error(self, sequence: Sequence, error: Exception, fault: str = "") -> None:
        if fault:
            logger.error("request_id=%s %s", sequence.request.request_id, fault, exc_info=error)
        self._end(sequence)
        self._counters.num_failed_requests += 1
        chunk = TokenChunk(sequence.request.request_id, [], error=engine_error(error))
        self._outbox.add(sequence, chunk)

    def _fail_step(self, flight: Flight, error: Exception) -> None:
        """End the requests of a failed step, unless executors were replaced; make all others prefill again.

        Other steps in flight are given up: what they would commit, their sequences find again.
        """
        self._counters.num_failed_steps += 1
        self._counters.last_error = str(error_to_wire(error)["message"])
        logger.warning(
            "step %d failed with %d rows: %s",
            flight.planned.plan.step_id,
            len(flight.planned.sequences),
            self._counters.last_error,
            exc_info=not isinstance(error, DFlashError),
        )
        self._flights.clear()
        for sequence in flight.planned.sequences:
            if self._planner.is_running(sequence) and not sequence.outlives(error):
                self._end_with_error(sequence, error)
        self._planner.preempt_all()
        self._cohorts.pause()
        self._step_clock.pause()

    def _end_all(self, error: Exception) -> None:
        self._flights.clear()
        self._planner.clear()
        for sequence in self._inbox.evict_all():
            self._end_with_error(sequence, error)
        self._publish()

    def _publish(self) -> None:
        """Hand the step's chunks to the sink; if it fails, tell the requests that lost tokens."""
        lost = self._outbox.publish()
        for sequence in lost:
            self._end_with_error(sequence, FatalError("The engine lost tokens of this request."))
        if lost:
            self._counters.last_error = self._outbox.last_error
            self._outbox.publish()
