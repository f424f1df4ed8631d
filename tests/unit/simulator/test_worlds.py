"""Simulated acceptance is the scripted one, and what lies behind an end had no trial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from gateway.coordinator.block_scheduler.records import Decision, RowState, StepLoad, StepOutcome
from loadtest.simulator.baselines import StaticWidth
from loadtest.simulator.costs import CPU
from loadtest.simulator.loop import Drafter, Phase, Policy, Scenario, simulate
from loadtest.simulator.run_record import RunRecord
from loadtest.simulator.worlds import CODE, PROSE, TRAFFICS, Traffic, TrafficKind, pool_of

pytestmark = pytest.mark.unit


class RandomWidths(StaticWidth):
    """Verifies any width of a full draft block and keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(16)
        self._rng = np.random.default_rng(5)
        self.asked: list[Sequence[RowState]] = []
        self.outcomes: list[StepOutcome] = []

    def decide(self, rows: Sequence[RowState], load: StepLoad) -> Decision:
        decision = super().decide(rows, load)
        self.asked.append(rows)
        widths = [int(self._rng.integers(1, width + 1)) for width in decision.widths]
        return decision._replace(widths=widths, draft_width=16)

    def observe(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)


def play(policy: Policy, traffic: Traffic, *, max_steps: int = 300, streams: int = 32) -> RunRecord:
    return simulate(policy, Scenario((Phase(0, traffic, streams),), CPU, max_steps))


def test_hazards_come_out_whatever_widths_are_chosen() -> None:
    policy = RandomWidths()
    even = replace(CODE, request_sd=0.0)
    play(policy, Traffic("even", (even,)), max_steps=500)
    rows = [row for outcome in policy.outcomes for row in outcome.rows]
    trials = np.array([row.num_trials for row in rows])
    hits = np.array([row.num_accepted for row in rows])
    true = even.hazards(16, np.zeros(1))[0]
    for position in (1, 2, 4, 8):
        num_trials = int((trials >= position).sum())
        found = float((hits >= position).sum()) / num_trials
        spread = np.sqrt(true[position - 1] * (1 - true[position - 1]) / num_trials)
        assert abs(found - true[position - 1]) < 4 * spread


@pytest.mark.parametrize("kind", [CODE, PROSE])
def test_expected_tokens_are_what_is_drawn_on_average(kind: TrafficKind) -> None:
    record = play(StaticWidth(8), Traffic(kind.name, (kind,)), max_steps=400)
    assert record.tokens.sum() == pytest.approx(record.expected_tokens.sum(), rel=0.02)
    assert record.acceptance_length() == pytest.approx(kind.acceptance_length(8), rel=0.06)


def test_what_lies_behind_an_end_has_no_trial() -> None:
    policy = RandomWidths()
    short = replace(CODE, mean_output=12.0, max_output=20)
    play(policy, Traffic("short", (short,)))
    pool = pool_of(Traffic("short", (short,)), 0)
    num_censored = 0
    started: dict[int, int] = {}
    for rows, outcome in zip(policy.asked, policy.outcomes, strict=True):
        for row, width, result in zip(rows, outcome.decision.widths, outcome.rows, strict=True):
            # Sequences are numbered in the order in which requests start.
            prompt, length = pool.prompt_lens[row.seq_id], pool.output_lens[row.seq_id]
            num_output = started.setdefault(row.seq_id, 0)
            assert row.context == prompt + num_output
            assert row.max_width == min(16, 20 - num_output)
            assert result.num_accepted <= result.num_trials <= min(width - 1, length - num_output)
            assert result.num_trials - result.num_accepted in (0, 1)
            num_censored += result.num_trials == result.num_accepted < width - 1
            started[row.seq_id] += min(result.num_accepted + 1, length - num_output)
    assert num_censored > 20


def test_requests_are_the_same_however_many_are_drawn() -> None:
    few, many = pool_of(TRAFFICS["mixed"], 3), pool_of(TRAFFICS["mixed"], 4)
    pool_of.cache_clear()
    again = pool_of(TRAFFICS["mixed"], 3)
    few.ensure(10)
    many.ensure(10)
    again.ensure(1000)
    size = len(few.kinds)
    assert len(again.kinds) > size
    assert np.array_equal(few.luck, again.luck[:size])
    assert np.array_equal(few.output_lens, again.output_lens[:size])
    assert not np.array_equal(few.output_lens, many.output_lens)
    assert np.bincount(few.kinds).min() > size // 5


def test_narrow_drafts_are_accepted_a_little_less() -> None:
    narrow = CODE.hazards(4, np.zeros(1))[0]
    wide = CODE.hazards(16, np.zeros(1))[0]
    assert np.all(narrow < wide[:3])
    assert np.all(narrow > wide[:3] - 0.03)


def test_lost_drafter_leaves_plain_decoding_and_a_stale_one_gives_nothing() -> None:
    phases = tuple(
        Phase(100 * number, TRAFFICS["code"], 4, state) for number, state in enumerate(Drafter)
    )
    record = simulate(StaticWidth(8), Scenario(phases, CPU, 300, has_best_rate=True))
    assert record.tokens[:100].mean() > 12
    assert np.all(record.tokens[100:] == 4)
    assert np.all(record.draft_widths[100:200] == 1)
    assert np.all(record.draft_widths[200:] == 8)
    assert np.all(record.expected_tokens[100:] == 4)
    plain = record.expected_tokens[100:200] / record.expected_ms[100:200]
    assert plain == pytest.approx(record.best_rate[100:200])
