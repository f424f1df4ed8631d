"""The step loop: take requests, plan, run the ring, commit, publish."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from dflash_wire.errors import (
    ConfigError,
    DFlashError,
    EngineUnavailableError,
    FatalError,
    InvalidRequestError,
    error_from_wire,
    error_to_wire,
)
from dflash_wire.ports import EngineLimits, StepRing, TokenSink
from dflash_wire.records import CycleStats, GenerationRequest, Row, StepResult, TokenChunk
from gateway.coordinator.commit import RowCommit, check_result, commit_row
from gateway.coordinator.inbox import SHUTTING_DOWN, Inbox
from gateway.coordinator.planner import PlannedStep, Planner
from gateway.coordinator.policy import parse_policy
from gateway.coordinator.sequence import Sequence
from gateway.coordinator.stats import EngineCounters, EngineSnapshot
from gateway.coordinator.validation import check_limits, check_request

logger = logging.getLogger(__name__)

DEFAULT_MAX_WAITING = 1024


class Coordinator:
    """Owns the truth about every sequence of one engine group.

    Owner: whoever built it. One thread at a time drives it (``step``, ``run_forever``); any thread
    may call ``submit``, ``cancel``, ``close`` and ``snapshot``. The ring and the sink are called by
    the driver only.

    Every request ends in exactly one last chunk (a finish reason or an error);
    a cancelled one gets no further chunk. Executors are caches: after a failed step every surviving
    sequence prefills again, so nothing in their pools is trusted.

    Args:
        ring: the way to drafter and verifier.
        sink: where committed tokens go.
        limits: what the engine can hold.
        default_policy: block policy of requests that name none.
        clock: monotonic seconds.
        max_waiting: most sequences that may wait for admission.
        caches_prefixes: share full pages between sequences that begin alike.

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
    ) -> None:
        check_limits(limits)
        if max_waiting < 1:
            raise ConfigError(f"max_waiting is {max_waiting}; it must be at least 1.")
        try:
            parse_policy(default_policy, limits.max_draft_block_size)
        except InvalidRequestError as error:
            raise ConfigError(f"The default policy cannot work: {error}") from error
        self._ring = ring
        self._sink = sink
        self._limits = limits
        self._default_policy = default_policy
        self._clock = clock
        self._inbox = Inbox(max_waiting)
        self._planner = Planner(limits, caches_prefixes)
        self._counters = EngineCounters(
            accepted_drafts_by_position=[0] * (limits.max_draft_block_size - 1)
        )
        self._outbox: list[tuple[Sequence, TokenChunk]] = []
        self._last_cycle_ids: set[int] = set()
        self._last_commit_at = 0.0
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
        max_length = check_request(request, self._limits)
        policy_text = self._default_policy if request.policy is None else request.policy
        policy = parse_policy(policy_text, self._limits.max_draft_block_size)
        sequence = Sequence(request, max_length, policy, self._limits.page_size)
        self._inbox.add(sequence, self._planner.num_waiting)

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
        positions = self._counters.accepted_drafts_by_position.copy()
        return EngineSnapshot(
            num_running=self._planner.num_running,
            num_waiting=self._planner.num_waiting + self._inbox.num_arrived,
            num_free_pages=self._planner.pages.num_free,
            num_idle_pages=self._planner.pages.num_idle,
            num_pages=self._planner.pages.num_pages,
            num_preemptions=self._planner.num_preemptions,
            is_closed=self._has_shut_down,
            totals=replace(self._counters, accepted_drafts_by_position=positions),
        )

    def outstanding_tokens(self, expected_output_tokens: int) -> int:
        """Return the expected work of all live sequences in tokens (see ``outstanding``)."""
        arrived = self._inbox.outstanding_tokens(expected_output_tokens)
        return arrived + self._planner.outstanding_tokens(expected_output_tokens)

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
        """Run one step.

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
        started = self._clock()
        if self._take_inbox():
            self._end_all(EngineUnavailableError(SHUTTING_DOWN))
            self._has_shut_down = True
            return False
        if not self._planner.has_work:
            return False
        planned = self._planner.plan(self._counters.num_steps)
        for sequence, error in planned.failures:
            logger.error(
                "request_id=%s cannot be planned", sequence.request.request_id, exc_info=error
            )
            self._end_with_error(sequence, error)
        if planned.plan.rows:
            self._run(planned, started)
        self._publish()
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

    def _run(self, planned: PlannedStep, started: float) -> None:
        ring_started = self._clock()
        self._counters.num_steps += 1
        try:
            result = self._ring.run(planned.plan)
            if result.error is not None:
                raise error_from_wire(result.error)
            check_result(planned.plan, result)
        except Exception as error:
            self._fail_step(planned, error)
            return
        ring_ended = self._clock()
        self._counters.count_times(
            1e3 * (ring_started - started), 1e3 * (ring_ended - ring_started), result
        )
        self._commit(planned, result, started)
        self._counters.commit_ms += 1e3 * (self._clock() - ring_ended)

    def _commit(self, planned: PlannedStep, result: StepResult, started: float) -> None:
        """Commit all rows, then take the time, so that their cycles carry all of the step's."""
        commits: list[tuple[Sequence, Row, RowCommit]] = []
        feature_offset = planned.plan.feature_base
        for sequence, row, token_ids in zip(
            planned.sequences, planned.plan.rows, result.committed_token_ids, strict=True
        ):
            try:
                commit = commit_row(sequence, row, token_ids, feature_offset)
                self._counters.count_row(row, commit)
                self._planner.keep_prefix(sequence, commit.num_shareable)
                commits.append((sequence, row, commit))
            except Exception as error:
                logger.exception("request_id=%s cannot commit", sequence.request.request_id)
                self._end_with_error(sequence, error)
            feature_offset += row.num_positions
        last_commit_at, self._last_commit_at = self._last_commit_at, self._clock()
        last_cycle_ids, self._last_cycle_ids = self._last_cycle_ids, set()
        for sequence, row, commit in commits:
            cycle = None
            if not row.is_prefill:
                # Consecutive cycles follow each other without a gap: publishing counts as well.
                began = last_commit_at if sequence.seq_id in last_cycle_ids else started
                cycle = self._cycle(row, commit, result, began)
                sequence.stats.add(cycle)
                self._last_cycle_ids.add(sequence.seq_id)
            self._emit(sequence, commit, cycle)

    def _cycle(self, row: Row, commit: RowCommit, result: StepResult, began: float) -> CycleStats:
        wall_ms = 1e3 * (self._last_commit_at - began)
        return CycleStats(
            num_draft_tokens=row.width - 1,
            num_accepted_drafts=commit.num_accepted_drafts,
            num_committed=len(commit.token_ids),
            draft_ms=result.draft_ms,
            verify_ms=result.verify_ms,
            overhead_ms=max(0.0, wall_ms - result.draft_ms - result.verify_ms),
        )

    def _emit(self, sequence: Sequence, commit: RowCommit, cycle: CycleStats | None) -> None:
        if not commit.token_ids:
            return
        chunk = TokenChunk(sequence.request.request_id, commit.token_ids, cycle=cycle)
        chunk.num_before = sequence.num_output - len(commit.token_ids)
        if chunk.num_before == 0:
            chunk.num_cached_tokens = sequence.num_prefix_tokens
        if commit.finish_reason is not None:
            chunk.finish_reason = commit.finish_reason.value
            self._counters.num_finished += 1
            self._end(sequence)
        self._outbox.append((sequence, chunk))

    def _end(self, sequence: Sequence) -> None:
        self._planner.remove(sequence)
        self._inbox.forget(sequence)

    def _end_with_error(self, sequence: Sequence, error: Exception) -> None:
        self._end(sequence)
        self._counters.num_failed_requests += 1
        chunk = TokenChunk(sequence.request.request_id, [], error=_engine_error(error))
        self._outbox.append((sequence, chunk))

    def _fail_step(self, planned: PlannedStep, error: Exception) -> None:
        """End the requests of a failed step and make all others prefill again."""
        self._counters.num_failed_steps += 1
        self._counters.last_error = str(error_to_wire(error)["message"])
        logger.warning(
            "step %d failed with %d rows: %s",
            planned.plan.step_id,
            len(planned.sequences),
            self._counters.last_error,
            exc_info=not isinstance(error, DFlashError),
        )
        for sequence in planned.sequences:
            self._end_with_error(sequence, error)
        self._planner.preempt_all()

    def _end_all(self, error: Exception) -> None:
        self._planner.clear()
        for sequence in self._inbox.evict_all():
            self._end_with_error(sequence, error)
        self._publish()

    def _publish(self) -> None:
        """Hand the step's chunks to the sink; if it fails, tell the requests that lost tokens."""
        lost = self._try_publish()
        for sequence in lost:
            self._end_with_error(sequence, FatalError("The engine lost tokens of this request."))
        if lost:
            self._try_publish()

    def _try_publish(self) -> list[Sequence]:
        """Empty the outbox into the sink; return whose chunks the sink refused.

        A request cancelled during the step still commits: its chunk stops here, and the next step
        frees its pages before planning.
        """
        outbox, self._outbox = self._outbox, []
        chunks: dict[str, list[TokenChunk]] = {}
        for sequence, chunk in outbox:
            if not sequence.is_cancelled:
                chunks.setdefault(sequence.request.frame_address, []).append(chunk)
        if not chunks:
            return []
        try:
            self._sink.publish(chunks)
        except Exception as error:
            logger.exception("the token sink failed")
            self._counters.last_error = f"{type(error).__name__}: {error}"
            return [sequence for sequence, _ in outbox]
        return []


def _engine_error(error: Exception) -> dict[str, str | None]:
    """Return the wire form of what went wrong: unavailable engines may be retried, the rest not."""
    if isinstance(error, EngineUnavailableError | FatalError):
        return error_to_wire(error)
    return error_to_wire(FatalError(str(error_to_wire(error)["message"])))
