"""The closed loop: streams that each start their next request when the last one has ended, against one
policy.

Each step asks the policy for all rows, draws what is accepted by the true hazards, moves simulated time by
the true cost and tells the policy. Prefill takes no time here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np

from gateway.coordinator.block_scheduler.records import (
    DEFAULT_TRAFFIC,
    Decision,
    IntArray,
    RowOutcome,
    RowState,
    StepLoad,
    StepOutcome,
)
from loadtest.simulator.costs import ServedCost
from loadtest.simulator.run_record import RunRecord, StepRecord
from loadtest.simulator.worlds import TRAINED_WIDTH, RequestPool, Traffic, pool_of

STATIC_WIDTHS = (1, 2, 4, 6, 8, 12, 16)
_WIDTHS: IntArray = np.array(STATIC_WIDTHS)
_POSITION: IntArray = np.arange(1, TRAINED_WIDTH)


class Policy(Protocol):
    """Chooses widths; the block scheduler is one."""

    def decide(self, rows: Sequence[RowState], load: StepLoad) -> Decision:
        """Choose the widths of one step."""
        ...

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a step that has landed."""
        ...

    def forget(self, seq_id: int) -> None:
        """Drop what is known of a sequence that has ended."""
        ...


class Drafter(Enum):
    """What the drafter is up to."""

    UP = "up"
    LOST = "lost"
    """Known to be gone: no row may be wider than 1."""
    STALE = "stale"
    """It answers, but nothing of it is accepted."""


@dataclass(frozen=True, slots=True)
class Phase:
    """What holds from a step on. A change of traffic replaces all requests, one of streams only some."""

    start_step: int
    traffic: Traffic
    num_streams: int
    drafter: Drafter = Drafter.UP


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run: phases in order, the first at step 0; it ends at ``max_steps`` or ``max_tokens``."""

    phases: tuple[Phase, ...]
    cost: ServedCost
    max_steps: int
    max_tokens: int | None = None
    seed: int = 0
    is_tagged: bool = False
    """Whether rows tell the kind of their request as their traffic class."""
    has_best_rate: bool = False
    """Whether to note, per step, what the best static width would have given."""


def simulate(policy: Policy, scenario: Scenario) -> RunRecord:
    """Play ``scenario`` against ``policy``; the same seed gives the same requests, luck and noise."""
    return Run(policy, scenario).play()


class Streams:
    """The requests that are running. Owner: one run; ``restart``, ``resize`` and ``commit`` mutate.

    Invariant: every array has one entry per stream, and ``num_output < output_len`` for all of them.
    """

    def __init__(self, pool: RequestPool, is_tagged: bool) -> None:
        self.pool = pool
        self._is_tagged = is_tagged
        self._num_started = 0
        self._next_seq_id = 0
        self.request: IntArray = np.empty(0, np.int64)
        self.num_output: IntArray = np.empty(0, np.int64)
        self.seq_ids: list[int] = []
        self.tags: list[str] = []

    @property
    def context(self) -> IntArray:
        """Committed tokens per row, prompt included."""
        return self.pool.prompt_lens[self.request] + self.num_output

    @property
    def remaining(self) -> IntArray:
        """Tokens until the true end of each row's output, at least 1."""
        return self.pool.output_lens[self.request] - self.num_output

    @property
    def allowed(self) -> IntArray:
        """Tokens that each row's client still allows: what a policy may know."""
        return self.pool.max_outputs[self.request] - self.num_output

    def resize(self, num_streams: int) -> list[int]:
        """Start or drop streams at the end; return the sequences that were dropped. Mutates."""
        had = len(self.seq_ids)
        dropped = self.seq_ids[num_streams:]
        self.request = np.concatenate(
            [self.request[:num_streams], np.zeros(max(0, num_streams - had), np.int64)]
        )
        self.num_output = np.concatenate(
            [self.num_output[:num_streams], np.zeros(max(0, num_streams - had), np.int64)]
        )
        missing = range(had, num_streams)
        self.seq_ids = [*self.seq_ids[:num_streams], *(0 for _ in missing)]
        self.tags = [*self.tags[:num_streams], *("" for _ in missing)]
        for row in missing:
            self._start(row)
        return dropped

    def restart(self, pool: RequestPool) -> list[int]:
        """Replace every request by one of ``pool``; return the sequences that ended. Mutates."""
        ended = self.seq_ids
        self.pool, self._num_started = pool, 0
        self.seq_ids = list(ended)
        for row in range(len(ended)):
            self._start(row)
        return ended

    def commit(self, num_committed: IntArray) -> list[int]:
        """Move rows on, start the next request where one has ended; return those that ended. Mutates."""
        self.num_output = self.num_output + num_committed
        rows = np.flatnonzero(self.remaining <= 0).tolist()
        ended = [self.seq_ids[row] for row in rows]
        for row in rows:
            self._start(row)
        return ended

    def _start(self, row: int) -> None:
        self.pool.ensure(self._num_started + 1)
        self.request[row] = self._num_started
        self.num_output[row] = 0
        self.seq_ids[row] = self._next_seq_id
        self.tags[row] = (
            self.pool.kind_name(self._num_started) if self._is_tagged else DEFAULT_TRAFFIC
        )
        self._num_started += 1
        self._next_seq_id += 1


class Run:
    """One policy in one scenario. Owner of the streams and of everything that is recorded."""

    has_trees = False
    """Whether policies may ask for trees (see ``trees.TreeRun``)."""

    def __init__(self, policy: Policy, scenario: Scenario) -> None:
        self._policy = policy
        self._scenario = scenario
        self._cost = scenario.cost
        self._phases = list(scenario.phases)
        self._phase = self._phases[0]
        self._streams = Streams(self._pool(), scenario.is_tagged)
        rng = np.random.default_rng([scenario.seed, 1])
        self._noise = self._cost.noise(rng, scenario.max_steps)
        self._columns: list[StepRecord] = []
        self._best_rates: list[float] = []

    def play(self) -> RunRecord:
        """Run to the end."""
        most = self._scenario.max_tokens
        num_tokens = 0
        for step in range(self._scenario.max_steps):
            self._enter_phase(step)
            num_tokens += self._step(step)
            if most is not None and num_tokens >= most:
                break
        return RunRecord.of(self._columns, self._best_rates)

    def _pool(self) -> RequestPool:
        return pool_of(self._phase.traffic, self._scenario.seed)

    def _enter_phase(self, step: int) -> None:
        while self._phases and self._phases[0].start_step <= step:
            before, self._phase = self._phase, self._phases.pop(0)
            ended: list[int] = []
            if self._phase.traffic != before.traffic:
                ended += self._streams.restart(self._pool())
            ended += self._streams.resize(self._phase.num_streams)
            for seq_id in ended:
                self._policy.forget(seq_id)

    def _step(self, step: int) -> int:
        """Play one step; return its committed tokens."""
        streams = self._streams
        contexts = streams.context
        limits = np.minimum(streams.allowed, TRAINED_WIDTH)
        if self._phase.drafter is Drafter.LOST:
            limits = np.ones_like(limits)
        rows = list(
            map(RowState, streams.seq_ids, streams.tags, limits.tolist(), contexts.tolist())
        )
        decision = self._policy.decide(rows, StepLoad(allows_trees=self.has_trees))
        context = int(contexts.sum())
        if decision.tree is not None:
            return self._play_trees(step, decision, context)
        widths = np.array(decision.widths)
        _check(decision, widths, limits)
        if self._scenario.has_best_rate:
            self._best_rates.append(self._best_rate(limits, context))
        num_trials, num_accepted = self._draw(decision.draft_width, widths)
        committed = np.minimum(num_accepted + 1, streams.remaining)
        self._land(step, decision, num_trials, num_accepted, context, int(committed.sum()))
        for seq_id in streams.commit(committed):
            self._policy.forget(seq_id)
        return int(committed.sum())

    def _land(
        self,
        step: int,
        decision: Decision,
        num_trials: IntArray,
        num_accepted: IntArray,
        context: int,
        num_tokens: int,
    ) -> None:
        """Price the step, record it and tell the policy."""
        streams, draft_width = self._streams, decision.draft_width
        drafted = [draft_width if width > 1 else 1 for width in decision.widths]
        expected = self._expected(draft_width, np.array(decision.widths))
        ids, tags = streams.seq_ids, streams.tags
        trials, hits = num_trials.tolist(), num_accepted.tolist()
        nothing_cut = [0] * len(drafted)
        rows = list(map(RowOutcome, ids, tags, drafted, trials, hits, nothing_cut, decision.widths))
        num_drafting = len(drafted) - drafted.count(1)
        outcome = self._outcome(decision, sum(decision.widths), draft_width, num_drafting, context)
        self._observe(step, outcome._replace(rows=rows), num_tokens, expected)

    def _play_trees(self, step: int, decision: Decision, context: int) -> int:
        """Play a step of trees; return its committed tokens."""
        raise NotImplementedError("this world has no trees")

    def _outcome(
        self,
        decision: Decision,
        num_positions: int,
        draft_width: int,
        num_drafting: int,
        context: int,
    ) -> StepOutcome:
        """Price a step; its rows are left out, and the noise of its times."""
        num_rows = len(decision.widths)
        time = self._cost.times(
            num_rows, np.array([num_positions]), np.array([draft_width]), context, num_drafting
        )
        draft_ms, verify_ms, step_ms = (float(part[0]) for part in time)
        return StepOutcome(
            decision=decision,
            rows=[],
            num_rows=num_rows,
            num_positions=num_positions,
            num_prefill_positions=0,
            context=context,
            num_cohorts=1,
            draft_width=draft_width,
            draft_ms=draft_ms,
            verify_ms=verify_ms,
            step_ms=step_ms,
        )

    def _observe(
        self, step: int, outcome: StepOutcome, num_tokens: int, expected_tokens: float
    ) -> None:
        """Record a priced step and tell the policy, noise added."""
        factor = float(self._noise[step])
        assert outcome.step_ms is not None
        self._columns.append(
            StepRecord(
                num_tokens,
                outcome.step_ms * factor,
                expected_tokens,
                outcome.step_ms,
                outcome.draft_width,
                outcome.num_positions,
                outcome.num_rows,
            )
        )
        self._policy.observe(
            outcome._replace(
                draft_ms=outcome.draft_ms * factor,
                verify_ms=outcome.verify_ms * factor,
                step_ms=outcome.step_ms * factor if step else None,
            )
        )

    def _draw(self, draft_width: int, widths: IntArray) -> tuple[IntArray, IntArray]:
        """Return trials and accepted draft tokens ``[R]``; what lies behind the end had no trial."""
        streams = self._streams
        most = np.minimum(widths - 1, streams.remaining)
        if draft_width == 1:
            return most * 0, most * 0
        position = _POSITION[: draft_width - 1]
        luck = streams.pool.luck[
            streams.request[:, None], (streams.num_output - 1)[:, None] + position
        ]
        is_hit = (position <= most[:, None]) & (luck < self._hazards(draft_width))
        num_accepted = np.where(is_hit.all(axis=1), draft_width - 1, is_hit.argmin(axis=1))
        return np.minimum(num_accepted + 1, most), num_accepted

    def _hazards(self, draft_width: int) -> np.ndarray:
        hazards = self._streams.pool.hazards[:, draft_width - 2, : draft_width - 1]
        if self._phase.drafter is Drafter.STALE:
            return np.zeros((1, draft_width - 1), hazards.dtype)
        return hazards[self._streams.request]

    def _expected(self, draft_width: int, widths: IntArray) -> float:
        """Expected committed tokens of all rows."""
        if draft_width == 1 or self._phase.drafter is not Drafter.UP:
            return float(len(widths))
        streams = self._streams
        ended = np.minimum(widths, streams.remaining)
        return float(streams.pool.expected[streams.request, draft_width - 2, ended].sum())

    def _best_rate(self, limits: IntArray, context: int) -> float:
        """Highest expected committed tokens per ms over the static widths, as things are."""
        streams = self._streams
        allowed = np.minimum(limits[:, None], _WIDTHS)  # [R, widths]
        num_drafted = int(np.sum(limits > 1))
        time = self._cost.times(len(limits), allowed.sum(axis=0), _WIDTHS, context, num_drafted)
        ended = np.minimum(allowed, streams.remaining[:, None])
        index = np.maximum(_WIDTHS - 2, 0)
        tokens = streams.pool.expected[streams.request[:, None], index, ended].sum(axis=0)
        if self._phase.drafter is not Drafter.UP:
            tokens = np.full(len(_WIDTHS), float(len(limits)))
        return float((tokens / time.step_ms).max())


def _check(decision: Decision, widths: IntArray, limits: IntArray) -> None:
    """Hold a policy to its protocol.

    Raises:
        ValueError: a width is missing, below 1, or wider than its row or the draft allows.
    """
    is_fit = len(widths) == len(limits) and bool(
        np.all((widths >= 1) & (widths <= np.minimum(limits, decision.draft_width)))
    )
    if not is_fit:
        raise ValueError(f"decision {decision.decision_id} does not fit its rows")
