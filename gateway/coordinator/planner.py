"""Planning: who gets which positions of the next step, and the pages to write them to."""

from __future__ import annotations

from dataclasses import dataclass, field

from dflash_wire.ports import EngineLimits
from dflash_wire.records import Ingest, Row, StepPlan
from gateway.coordinator.block_scheduler.records import Decision
from gateway.coordinator.extras import ExtrasSlots
from gateway.coordinator.feeding import MOST_STEPS, FeatureRoom
from gateway.coordinator.learning import Learning
from gateway.coordinator.page_allocator import PageAllocator
from gateway.coordinator.sequence import Sequence
from gateway.coordinator.waiting import WaitingQueue
from gateway.coordinator.widths import RowWidth, WidthChooser, map_of, node_budget

PREFILL_SHARE = 4
"""One in this many positions goes to prefill in the step after one that had none left for it."""


@dataclass(slots=True)
class PlannedStep:
    """A plan and what it means here: ``sequences[i]`` owns ``plan.rows[i]``.

    ``failures`` are sequences that could not be planned because of an error in our own code.
    """

    plan: StepPlan
    sequences: list[Sequence] = field(default_factory=list)
    failures: list[tuple[Sequence, Exception]] = field(default_factory=list)
    decision: Decision | None = None
    """The block scheduler's, if it chose widths."""

    def add(self, sequence: Sequence, row: Row) -> None:
        """Append one row."""
        self.sequences.append(sequence)
        self.plan.rows.append(row)


class Planner:
    """The waiting queue, the running sequences and their pages.

    Owner: the coordinator; the driver thread alone mutates it. Other threads may read the ``num_*``
    properties and get values that are a step old at most.

    Args:
        limits: what the engine can hold.
        learning: of the block scheduler, which chooses widths where no policy fixes them.
        caches_prefixes: share full pages between sequences that begin alike.

    Invariants between steps:
        ``running`` and ``waiting`` are disjoint
        running sequences alone own pages, and no slot is needed beyond ``max_length``
        a sequence has a row in at most one step in flight, and keeps its pages until that has landed, unless
            it ends: executors run steps in order, so whoever gets its pages writes to them later
    """

    def __init__(
        self, limits: EngineLimits, learning: Learning, caches_prefixes: bool = True
    ) -> None:
        self._limits = limits
        drafters = limits.all_drafters
        blocks = [drafter.max_draft_block_size for drafter in drafters]
        self._token_readers = frozenset(i for i, d in enumerate(drafters) if d.reads_tokens)
        self.widths = WidthChooser(blocks, limits.max_tree_positions, learning)
        self._caches_prefixes = caches_prefixes
        self.pages = self._new_pages()
        self.waiting = WaitingQueue()
        self.running: dict[int, Sequence] = {}
        self.num_preemptions = 0
        self._extras = ExtrasSlots()
        self._features = FeatureRoom(limits.max_step_positions)
        self.is_short_of_pages = False
        """A row went without a turn because pages ran out while others were in flight: nothing more may be
        sent until those have landed, for only then may somebody lose his pages."""
        self._may_preempt = True
        self._last_verified_id = -1
        self._prefill_starved = False

    @property
    def num_waiting(self) -> int:
        """Sequences without pages, preempted ones included."""
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        """Sequences with pages."""
        return len(self.running)

    def outstanding_tokens(self, expected_output_tokens: int) -> int:
        """Expected work of all sequences here (see ``outstanding``); any thread may ask."""
        # Both copies are one call into C, so the driver cannot change what is being copied.
        sequences = [*list(self.running.values()), *self.waiting.copy()]
        return sum(s.outstanding_tokens(expected_output_tokens) for s in sequences)

    @property
    def has_work(self) -> bool:
        """Whether a plan would have rows."""
        return bool(self.running or self.waiting)

    def enqueue(self, sequence: Sequence) -> None:
        """Put a new sequence into the queue. Mutates."""
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Drop a sequence, wherever it is, and free its pages. Mutates."""
        if self.running.pop(sequence.seq_id, None) is None:
            self.waiting.remove(sequence)
        self.pages.release(sequence.seq_id)
        self._extras.release(sequence)
        self.widths.forget(sequence.seq_id)

    def clear(self) -> None:
        """Drop every sequence and free every page, whatever state they are in. Mutates."""
        self.running.clear()
        self.waiting.clear()
        self.is_short_of_pages = False
        self.pages = self._new_pages()

    def _new_pages(self) -> PageAllocator:
        limits = self._limits
        return PageAllocator(limits.num_pages, limits.page_size, len(limits.all_drafters))

    def preempt_all(self) -> None:
        """Send every running sequence back to the queue: the executors' pools are in doubt. Mutates."""
        for sequence in self.running.values():
            sequence.is_in_flight = False
        while self.running:
            self._preempt_last()
        self.pages.forget_prefixes()

    def keep_prefix(self, sequence: Sequence, num_positions: int) -> None:
        """Let others share the sequence's pages that the first ``num_positions`` fill. Mutates.

        Args:
            sequence: a running sequence.
            num_positions: positions that every pool has: target KV, and drafter context if the policy may
                draft.
        """
        first, num_full = sequence.num_named_pages, num_positions // self._limits.page_size
        # Once per page and not once per step: this runs for every row.
        if self._caches_prefixes and num_full > first:
            names = sequence.page_names.of(sequence.token_ids, num_positions)
            self.pages.name_pages(sequence.seq_id, names, sequence.context, first)
            sequence.num_named_pages = num_full

    def plan(self, step_id: int, num_cohorts: int = 1, num_in_flight: int = 0) -> PlannedStep:
        """Plan one step of those that are not in flight. Mutates queues, pages and pending ingests, never
        tokens.

        Verify rows come first; what they leave of the step's positions goes to prefill chunks. Features are
        ingested before a sequence drafts, and before others overwrite them (see ``FeatureRoom``).

        Args:
            step_id: of the step; ascends by one.
            num_cohorts: share the decoding sequences between so many steps in flight.
            num_in_flight: steps sent that have not landed; while there are any, nobody is preempted.

        Returns:
            A plan with at least one row, unless every sequence failed, is in flight or lacks pages, or none
            is left.

        Raises:
            RuntimeError: no sequence can move although none failed; the state is corrupt.
        """
        planned = PlannedStep(StepPlan(step_id, [], num_cohorts=num_cohorts))
        self._may_preempt = num_in_flight == 0
        self.is_short_of_pages = False
        state = None
        while not planned.plan.rows and self.has_work:
            # A round without rows has preempted or failed somebody.
            # The same once more without a share for prefill is no second try.
            now = (len(self.running), len(planned.failures), self._prefill_starved)
            if state == (state := now):
                if num_in_flight:
                    break
                raise RuntimeError(f"nothing can be planned for {len(self.running)} sequences")
            budget = self._limits.max_step_positions
            share = max(1, budget // PREFILL_SHARE) if self._prefill_starved else 0
            self._add_verify_rows(planned, budget - share)
            used = max(planned.plan.num_positions, planned.plan.num_features)
            self._add_prefill_rows(planned, budget - used)
        if planned.plan.rows:
            base, is_due = self._features.place(planned.plan.num_features)
            planned.plan.feature_base = base
            planned.plan.ingests = self._take_ingests(planned.plan, is_due)
        for sequence in planned.sequences:
            sequence.is_in_flight = True
        return planned

    def land(self, planned: PlannedStep) -> None:
        """A step is back: its sequences may be planned again. Mutates."""
        for sequence in planned.sequences:
            sequence.is_in_flight = False

    def is_running(self, sequence: Sequence) -> bool:
        """Whether the sequence still has its pages, and was not ended while it was in flight."""
        return self.running.get(sequence.seq_id) is sequence

    def _add_verify_rows(self, planned: PlannedStep, budget: int) -> None:
        sharing: list[int] = []
        # By rank: a victim comes after the row that needs its pages, so it has no row yet.
        for row in sorted(self._select(planned, budget), key=lambda row: row.sequence.rank):
            sequence = row.sequence
            if sequence.seq_id not in self.running:
                continue
            try:
                end = sequence.anchor_position + min(row.width, row.draft_width)
                if self._grow(sequence, end):
                    planned.add(sequence, self._verify_row(row))
                    sharing.append(map_of(row, planned.decision))
            except Exception as error:
                self._fail(planned, sequence, error)

        planned.plan.node_budget = node_budget(sharing, planned.decision)

    def _select(self, planned: PlannedStep, budget: int) -> list[RowWidth]:
        """Choose decoding sequences and their widths, round-robin when they exceed the budget."""
        everyone = [s for _, s in sorted(self.running.items()) if s.is_decoding]
        decoding = [s for s in everyone if not s.is_in_flight]
        most_rows = -(-len(everyone) // planned.plan.num_cohorts)
        start = next((i for i, s in enumerate(decoding) if s.seq_id > self._last_verified_id), 0)
        selected = self.widths.choose(
            (decoding[start:] + decoding[:start])[:most_rows],
            min(len(decoding), most_rows),
            budget,
            self._num_to_prefill(),
            planned.plan.num_cohorts,
        )
        for sequence, error in selected.failures:
            self._fail(planned, sequence, error)
        planned.decision = selected.decision
        if selected.rows:
            self._last_verified_id = selected.rows[-1].sequence.seq_id
        return selected.rows

    def _num_to_prefill(self) -> int:
        """Positions that running sequences have yet to prefill, as far as a step holds them."""
        waiting = (s for s in self.running.values() if not s.is_decoding and not s.is_in_flight)
        most = self._limits.max_step_positions
        return min(most, sum(s.num_committed - s.num_cached for s in waiting))

    def _verify_row(self, row: RowWidth) -> Row:
        sequence = row.sequence
        return Row(
            seq_id=sequence.seq_id,
            token_ids=sequence.token_ids[-1:],
            start_position=sequence.anchor_position,
            page_ids=self.pages.table(sequence.seq_id),
            width=row.width,
            sampling=sequence.request.sampling,
            drafter=sequence.drafter,
            draft_width=row.draft_width,
            is_tree=row.is_tree,
            extras=sequence.extras,
        )

    def _add_prefill_rows(self, planned: PlannedStep, budget: int) -> None:
        prefilling = [s for s in self.running.values() if not s.is_decoding and not s.is_in_flight]
        num_rows_before = len(planned.plan.rows)
        while budget > 0 and (prefilling or self._can_admit()):
            sequence = prefilling.pop(0) if prefilling else self._admit()
            try:
                row = self._prefill_row(sequence, budget)
            except Exception as error:
                self._fail(planned, sequence, error)
                continue
            planned.add(sequence, row)
            budget -= row.num_positions
        self._prefill_starved = len(planned.plan.rows) == num_rows_before and (
            bool(prefilling) or self._can_admit()
        )

    def _prefill_row(self, sequence: Sequence, budget: int) -> Row:
        start = sequence.num_cached
        chunk = sequence.token_ids[start : start + budget]
        end = start + len(chunk)
        # Admission took the pages of all committed tokens: a prefill never waits half-way.
        return Row(
            seq_id=sequence.seq_id,
            token_ids=chunk,
            start_position=start,
            page_ids=self.pages.table(sequence.seq_id),
            is_prefill=True,
            samples=end == sequence.num_committed,
            sampling=sequence.request.sampling,
            extras=self._extras.of_prefill(sequence, end),
        )

    def _can_admit(self) -> bool:
        """Whether the next waiting sequence may start without taking pages from anyone."""
        if not self.waiting or len(self.running) >= self._limits.max_rows:
            return False
        if self.is_short_of_pages:
            return False
        head = self.waiting.head
        # Room for a first draft block as well, or it would be preempted right after its prefill.
        # So a sequence can not return in the step that preempted it: it held no more than this.
        num_positions = head.num_committed + self._limits.max_draft_block_size
        num_positions = min(num_positions, head.max_length)
        return self.pages.can_start(self.cached_pages(head), num_positions)

    def _admit(self) -> Sequence:
        sequence = self.waiting.take()
        cached_pages = self.cached_pages(sequence)
        self.running[sequence.seq_id] = sequence
        self.pages.adopt(sequence.seq_id, cached_pages)
        self.pages.ensure(sequence.seq_id, sequence.num_committed)
        sequence.num_named_pages = len(cached_pages)
        sequence.num_cached = len(cached_pages) * self._limits.page_size
        if sequence.num_prefix_tokens is None:
            sequence.num_prefix_tokens = sequence.num_cached
        return sequence

    def cached_pages(self, sequence: Sequence) -> list[int]:
        """Pages that hold the sequence's beginning; at least its last token is left to compute.

        Any thread may ask; what others than the driver get can be out of date.
        """
        if not self._caches_prefixes or sequence.asks_prompt_logprobs:
            return []
        names = sequence.page_names.of(sequence.token_ids, sequence.num_committed - 1)
        return self.pages.match(names, sequence.context)

    def _grow(self, sequence: Sequence, num_positions: int) -> bool:
        """Get pages for a running sequence, from those of the last rank if need be.

        Returns:
            False when the sequence itself was the last and has been preempted, or nobody may be and it has
            to wait. One that runs alone never is: ``check_request`` made sure that it fits alone.
        """
        while not self.pages.ensure(sequence.seq_id, num_positions):
            if not self._may_preempt:
                if not self.is_short_of_pages:
                    # Its turn is next, when it may preempt: or newcomers would get what others leave.
                    self._last_verified_id = sequence.seq_id - 1
                self.is_short_of_pages = True
                return False
            if self._preempt_last() is sequence:
                return False
        return True

    def _preempt_last(self) -> Sequence:
        """Free the pages of the running sequence of the last rank; it will prefill again."""
        sequence = max(self.running.values(), key=lambda s: s.rank)
        del self.running[sequence.seq_id]
        self.pages.release(sequence.seq_id)
        self._extras.release(sequence)
        sequence.forget_caches()
        self.waiting.add(sequence)
        self.num_preemptions += 1
        return sequence

    def _fail(self, planned: PlannedStep, sequence: Sequence, error: Exception) -> None:
        self.remove(sequence)
        planned.failures.append((sequence, error))

    def _take_ingests(self, plan: StepPlan, is_due: bool) -> list[Ingest]:
        """Turn pending features into ingests: of rows that draft in this step, or all if they are due.

        Those of prompts are due at once, for others may share their pages only then.
        """
        drafting = {row.seq_id for row in plan.rows if row.width > 1}
        ingests: list[Ingest] = []
        for sequence in self.running.values():
            is_wanted = is_due or sequence.seq_id in drafting
            if is_wanted or any(run.num_tokens > MOST_STEPS for run in sequence.pending_ingests):
                pages = self.pages.table(sequence.seq_id)
                for offset, num_tokens, start, stride in sequence.pending_ingests:
                    ingest = Ingest(offset, num_tokens, start, pages, sequence.drafter, stride)
                    if sequence.drafter in self._token_readers:
                        ingest.token_ids = sequence.token_ids[start : start + num_tokens]
                    ingests.append(ingest)
                sequence.pending_ingests = []
        return ingests
