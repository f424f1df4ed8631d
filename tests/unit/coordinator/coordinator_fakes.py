"""A fake engine with a toy target, and the bench that puts it around a coordinator.

The toy target's next token is a hash of the seed and all tokens before it. ``FakeRing`` computes it
from what its KV pool holds under a row's page table, so a wrong page, a missing position or a stale
slot changes the output or breaks one of the checks that every step makes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from fake_trees import fake_tree, most_drafts
from recording_sink import RecordingSink
from toy_target import (
    VOCAB,
    Drafter,
    advance,
    always_right,
    next_token,
    plain_generation,
    start_state,
)

from dflash_wire.drafters import DrafterLimits
from dflash_wire.ports import EngineLimits
from dflash_wire.records import GenerationRequest, Row, StepPlan, StepResult
from dflash_wire.sampling import SamplingParams
from dflash_wire.trees import TreeOutcome
from gateway.coordinator import Coordinator

Sabotage = Callable[[StepPlan, StepResult], StepResult]


# ----- the ring ---------------------------------------------------------------------------------


class Entry(NamedTuple):
    """What one slot or one feature row holds: it was computed from a token and all tokens before it.

    So two sequences that begin alike may share it, and no others.
    """

    position: int
    token_id: int
    prefix: int

    @staticmethod
    def of(token_ids: list[int]) -> list[Entry]:
        """The entries of a whole sequence."""
        entries, prefix = [], start_state(0)
        for position, token_id in enumerate(token_ids):
            prefix = advance(prefix, token_id)
            entries.append(Entry(position, token_id, prefix))
        return entries


class FakeRing:
    """Drafters and verifier in one, checking every invariant of the plans it gets.

    Coordinators turn exceptions of the ring into failed requests, so broken invariants are also
    kept in ``violations``; tests must look there (``Bench`` does).
    """

    def __init__(self, limits: EngineLimits, *drafters: Drafter) -> None:
        self.limits = limits
        self.drafters = drafters or (always_right,)
        self.plans: list[StepPlan] = []
        self.violations: list[str] = []
        self.sabotage: Sabotage | None = None
        self.on_run: Callable[[StepPlan], None] = lambda plan: None
        self.num_most_in_flight = 0
        self._in_flight: deque[StepPlan] = deque()
        self._given_up: set[int] = set()
        self.draft_ms = 0.25
        self.verify_ms = 0.5
        self._histories: dict[int, list[int]] = {}
        self._last_step_id = -1
        self.lose_everything()

    def lose_everything(self) -> None:
        """Empty all pools, as a replaced executor would."""
        self._kv: dict[int, Entry] = {}
        self._context: list[dict[int, Entry]] = [{} for _ in self.drafters]
        self._features: dict[int, Entry] = {}

    def send(self, plan: StepPlan) -> None:
        """Draft at once, as a drafter does that is ahead of the verifier."""
        self.plans.append(plan)
        self.num_most_in_flight = max(self.num_most_in_flight, len(self._in_flight) + 1)
        self.on_run(plan)
        with self._watched(plan):
            self._check_plan(plan)
            self._ingest(plan)
            for row in plan.rows:
                if row.width > 1:
                    self._check_context(row)
        self._in_flight.append(plan)

    def receive(self, step_id: int) -> StepResult:
        """Verify in order, given-up steps too, until the one asked for."""
        while True:
            plan = self._in_flight.popleft()
            if plan.step_id in self._given_up:
                # It still writes, but nobody learns what it committed.
                histories = {seq_id: tokens.copy() for seq_id, tokens in self._histories.items()}
                with suppress(AssertionError):
                    self._verify_step(plan)
                self._histories = histories
                continue
            histories = {seq_id: tokens.copy() for seq_id, tokens in self._histories.items()}
            with self._watched(plan):
                result = self._verify_step(plan)
            if plan.step_id == step_id:
                break
        if self.sabotage is not None:
            sabotage, self.sabotage = self.sabotage, None
            self.lose_everything()
            self._histories = histories  # nobody learns what the step committed
            self._given_up |= {plan.step_id for plan in self._in_flight}
            return sabotage(plan, result)
        return result

    @contextmanager
    def _watched(self, plan: StepPlan) -> Iterator[None]:
        try:
            yield
        except AssertionError as error:
            self.violations.append(f"step {plan.step_id}: {error}")
            raise

    def _verify_step(self, plan: StepPlan) -> StepResult:
        committed: list[list[int]] = []
        trees: list[TreeOutcome | None] = []
        most = most_drafts(plan)
        for index, (row, offset) in enumerate(zip(plan.rows, plan.feature_offsets(), strict=True)):
            if row.is_prefill:
                committed.append(self._prefill(row, offset))
            else:
                committed.append(self._verify(row, offset, most[index]))
            accepted = len(committed[-1]) - 1
            trees.append(fake_tree(row, accepted, most[index]) if row.is_tree else None)
        result = StepResult(plan.step_id, committed, self.draft_ms, self.verify_ms)
        result.trees = trees if any(trees) else None
        return result

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.step_id > self._last_step_id, "step ids must ascend"
        self._last_step_id = plan.step_id
        seq_ids = {row.seq_id for row in plan.rows}
        assert len(seq_ids) == len(plan.rows), "a sequence has two rows"
        for other in self._in_flight:
            if other.step_id in self._given_up:
                continue
            mine, theirs = (
                range(step.feature_base, step.feature_base + step.num_features)
                for step in (plan, other)
            )
            assert mine.stop <= theirs.start or theirs.stop <= mine.start, "features overwritten"
            both = seq_ids & {row.seq_id for row in other.rows}
            assert not both, f"sequences {both} are in two steps"
        assert 0 < len(plan.rows) <= self.limits.max_rows, f"{len(plan.rows)} rows"
        assert plan.num_positions <= self.limits.max_step_positions, "too many positions"
        pool = range(2 * self.limits.max_step_positions)
        assert plan.feature_base in pool, "features outside the pool"
        assert plan.feature_base + plan.num_features <= pool.stop, "features outside the pool"
        for row in plan.rows:
            drafter = self.limits.all_drafters[row.drafter]
            assert 1 <= row.drafted_width <= drafter.max_draft_block_size, f"width {row.width}"
            assert row.is_tree or 1 <= row.width <= row.drafted_width or row.is_prefill
            assert len(row.token_ids) >= 1, "an empty row"
            end = row.start_position + row.most_kept
            assert end <= self.limits.max_context, f"row {row.seq_id} leaves the context"
            self._check_table(row.page_ids)
            assert len(row.page_ids) * self.limits.page_size >= end, f"row {row.seq_id} lacks pages"
        for ingest in plan.ingests:
            self._check_table(ingest.page_ids)
        self._check_writes([(r.page_ids, r.start_position, r.most_kept) for r in plan.rows])
        self._check_writes([(i.page_ids, i.start_position, i.num_tokens) for i in plan.ingests])

    def _check_table(self, page_ids: list[int]) -> None:
        assert len(set(page_ids)) == len(page_ids), f"a page is held twice: {page_ids}"
        for page_id in page_ids:
            assert 0 <= page_id < self.limits.num_pages, f"no page {page_id}"

    def _check_writes(self, writes: list[tuple[list[int], int, int]]) -> None:
        """Nobody else may hold a page that is written to; full ones may be shared."""
        size = self.limits.page_size
        tables = {tuple(page_ids) for page_ids, _, _ in writes}
        holders = Counter(page_id for page_ids in tables for page_id in page_ids)
        for page_ids, start, count in writes:
            for page_id in page_ids[start // size : -(-(start + count) // size)]:
                assert holders[page_id] == 1, f"page {page_id} is shared and written"

    def _ingest(self, plan: StepPlan) -> None:
        for ingest in plan.ingests:
            for i in range(ingest.num_tokens):
                entry = self._features[ingest.feature_offset + i * ingest.stride]
                assert entry.position == ingest.start_position + i, f"wrong features: {entry}"
                assert ingest.token_ids is None or ingest.token_ids[i] == entry.token_id, entry
                self._context[ingest.drafter][self._slot(ingest.page_ids, entry.position)] = entry

    def _slot(self, page_ids: list[int], position: int) -> int:
        page, offset = divmod(position, self.limits.page_size)
        return page_ids[page] * self.limits.page_size + offset

    def _check_context(self, row: Row) -> None:
        """Check that the drafter's pool holds [0, start_position)."""
        for wanted in Entry.of(self._histories[row.seq_id][: row.start_position]):
            held = self._context[row.drafter].get(self._slot(row.page_ids, wanted.position))
            assert held == wanted, f"drafter context has {held}, not {wanted}"

    def _read_prefix(self, row: Row) -> int:
        """Check the KV pool for [0, start_position) and return the target's state behind it."""
        state = start_state(row.sampling.seed)
        history = self._histories[row.seq_id]
        for wanted in Entry.of(history[: row.start_position]):
            slot = self._slot(row.page_ids, wanted.position)
            assert self._kv.get(slot) == wanted, f"KV has {self._kv.get(slot)}, not {wanted}"
            state = advance(state, self._kv[slot].token_id)
        return state

    def _write(self, row: Row, token_ids: list[int], offset: int, num_cached: int) -> None:
        assert len(token_ids) <= row.most_kept, f"row {row.seq_id} keeps too much"
        before = self._histories[row.seq_id][: row.start_position]
        entries = Entry.of([*before, *token_ids])[row.start_position :]
        for i, entry in enumerate(entries):
            self._features[offset + i] = entry
            if i < num_cached:
                self._kv[self._slot(row.page_ids, entry.position)] = entry

    def _prefill(self, row: Row, offset: int) -> list[int]:
        history = self._histories.setdefault(row.seq_id, [])
        if row.start_position > len(history):
            # Others have computed this beginning, all of it or what a preempted prefill had left.
            history.extend(self._cached_tokens(row)[len(history) :])
        end = row.start_position + len(row.token_ids)
        known = history[row.start_position : end]
        assert known == row.token_ids[: len(known)], "a prefill changed committed tokens"
        history.extend(row.token_ids[len(known) :])
        state = self._read_prefix(row)
        for token_id in row.token_ids:
            state = advance(state, token_id)
        self._write(row, row.token_ids, offset, len(row.token_ids))
        if not row.samples:
            return []
        assert end == len(history), "a sampling prefill must read every committed token"
        history.append(next_token(state))
        return [history[-1]]

    def _cached_tokens(self, row: Row) -> list[int]:
        """The tokens in front of a row that begins behind a cached prefix."""
        slots = [self._slot(row.page_ids, position) for position in range(row.start_position)]
        assert all(slot in self._kv for slot in slots), "the cached prefix is not in the KV pool"
        return [self._kv[slot].token_id for slot in slots]

    def _verify(self, row: Row, offset: int, most_drafts: int) -> list[int]:
        history = self._histories[row.seq_id]
        assert row.start_position == len(history) - 1, "the anchor must be the last committed token"
        assert row.token_ids == history[-1:], "a verify row carries the anchor alone"
        state = advance(self._read_prefix(row), row.token_ids[0])
        longest = min(row.most_kept - 1, most_drafts)  # a tree's longest path
        drafts = self.drafters[row.drafter](state, longest)
        committed = [next_token(state)]
        for draft in drafts:
            if draft != committed[-1]:
                break
            state = advance(state, draft)
            committed.append(next_token(state))
        self._write(row, [*row.token_ids, *drafts], offset, len(committed))
        history.extend(committed)
        return committed


# ----- everything together ----------------------------------------------------------------------


def make_limits(drafters: tuple[DrafterLimits, ...] = (), **changes: int) -> EngineLimits:
    values = {
        "num_pages": 256,
        "page_size": 4,
        "max_step_positions": 160,
        "max_rows": 8,
        "max_context": 256,
        "max_draft_block_size": 16,
    }
    return EngineLimits(**(values | changes), drafters=drafters)


def make_request(
    request_id: str,
    num_prompt: int = 5,
    max_tokens: int = 20,
    seed: int = 0,
    stop: Iterable[int] = (),
    policy: str | None = None,
    family: int | None = None,
    salt: str = "",
    priority: int = 0,
    drafter: str | None = None,
) -> GenerationRequest:
    """Prompts of one ``family`` begin alike; without one, prompts differ from their first token."""
    first = 3 * seed + num_prompt if family is None else 50 * family
    prompt = [(7 * i + first) % VOCAB for i in range(num_prompt)]
    sampling = SamplingParams(temperature=1.0, seed=seed)
    return GenerationRequest(
        request_id,
        prompt,
        max_tokens,
        sampling,
        list(stop),
        policy,
        frame_address=f"to-{seed % 3}",
        cache_salt=salt,
        priority=priority,
        drafter=drafter,
    )


class Bench:
    """A coordinator between a checking ring and a recording sink."""

    def __init__(
        self,
        limits: EngineLimits | None = None,
        drafter: Drafter | tuple[Drafter, ...] = always_right,
        policy: str = "static:4",
        **kwargs: object,
    ) -> None:
        self.limits = limits or make_limits()
        drafters = drafter if isinstance(drafter, tuple) else (drafter,)
        assert len(drafters) == len(self.limits.all_drafters)
        self.ring = FakeRing(self.limits, *drafters)
        self.sink = RecordingSink()
        self.coordinator = Coordinator(self.ring, self.sink, self.limits, policy, **kwargs)  # type: ignore[arg-type]
        self.requests: dict[str, GenerationRequest] = {}

    def submit(self, request: GenerationRequest) -> None:
        self.coordinator.submit(request)
        self.requests[request.request_id] = request

    def step(self) -> bool:
        has_run = self.coordinator.step()
        self.coordinator.check_integrity()
        self.check_protocol()
        return has_run

    def run_until_idle(self, most_steps: int = 20_000) -> None:
        for _ in range(most_steps):
            if not self.step():
                return
        raise AssertionError(f"still busy after {most_steps} steps")

    def check_protocol(self) -> None:
        assert self.ring.violations == []
        assert self.sink.violations == []

    def check_finished(self, request_id: str) -> None:
        request = self.requests[request_id]
        tokens, reason = plain_generation(request, self.limits.max_context)
        last = self.sink.last(request_id)
        assert last.error is None
        assert self.sink.tokens(request_id) == tokens
        assert last.finish_reason == reason
        assert self.sink.addresses[request_id] == {request.frame_address}

    def check_all_finished(self) -> None:
        for request_id in self.requests:
            self.check_finished(request_id)
        self.check_empty()

    def check_empty(self) -> None:
        snapshot = self.coordinator.snapshot()
        assert (snapshot.num_running, snapshot.num_waiting) == (0, 0)
        assert snapshot.num_free_pages == snapshot.num_pages
        self.coordinator.check_integrity()
