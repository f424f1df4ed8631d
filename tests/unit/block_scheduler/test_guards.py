"""Changes come when regret has added up, at once when load grows, and probes become rare."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gateway.coordinator.block_scheduler.allocation import Option
from gateway.coordinator.block_scheduler.guards import (
    GuardSettings,
    ProbeBudget,
    WidthGuard,
)


def options(**values: float) -> dict[int, Option]:
    """Options by draft width: ``w4=1.2`` commits 1.2 tokens in a millisecond."""
    return {
        (width := int(name[1:])): Option(width, width, value, 1.0) for name, value in values.items()
    }


class Guarded:
    """A guard that is asked step by step, with steps of a millisecond."""

    def __init__(self, draft_width: int, rows: int = 60) -> None:
        self.guard = WidthGuard(GuardSettings(plain_margin=0.0))
        self.step = 0
        self.choose(rows, **{f"w{draft_width}": 1.0})
        assert self.guard.draft_width == draft_width

    def choose(self, rows: int = 60, **values: float) -> int:
        """One step; the draft width chosen."""
        self.step += 1
        return self.guard.choose(options(**values), rows, self.step)[0].draft_width

    def steps_until_switch(self, rows: int = 60, **values: float) -> int:
        """Steps until the guard changes; at most 1000."""
        before = self.guard.num_switches
        for step in range(1, 1001):
            self.choose(rows, **values)
            if self.guard.num_switches > before:
                return step
        return 1001


def test_the_first_choice_is_the_best_and_no_switch() -> None:
    guard = WidthGuard(GuardSettings())
    chosen, _ = guard.choose(options(w1=1.0, w8=1.5, w16=1.2), 1, 1)
    assert (chosen.draft_width, guard.num_switches) == (8, 0)


@pytest.mark.parametrize(("gain", "least", "most"), [(1.0, 8, 8), (0.04, 8, 9), (0.01, 30, 50)])
def test_the_larger_the_gain_the_sooner_the_change(gain: float, least: int, most: int) -> None:
    assert least <= Guarded(4).steps_until_switch(w4=1.0, w8=1.0 + gain) <= most


def test_half_a_percent_is_never_worth_it() -> None:
    assert Guarded(4).steps_until_switch(w4=1.0, w8=1.004) == 1001


def test_the_fewer_rows_the_longer_a_gain_must_last() -> None:
    steps = [Guarded(4, n).steps_until_switch(n, w4=1.0, w8=1.04) for n in (1, 6, 60)]
    assert steps[0] > 3 * steps[1] > 5 * steps[2]
    assert Guarded(4, 1).steps_until_switch(1, w4=1.0, w8=1.01) < 1000, "small gains count as well"
    assert Guarded(4, 1).steps_until_switch(1, w4=1.0, w8=1.004) == 1001


def test_the_sooner_after_a_change_the_more_it_takes() -> None:
    guarded = Guarded(4)
    first = guarded.steps_until_switch(w4=1.0, w8=1.05)
    assert guarded.steps_until_switch(w4=1.05, w8=1.0) > 5 * first


def test_what_follows_plain_decoding_is_a_first_choice() -> None:
    first = Guarded(4).steps_until_switch(w4=1.0, w8=1.05)
    guarded = Guarded(1)
    guarded.steps_until_switch(w1=1.0, w4=3.0)
    assert guarded.steps_until_switch(w4=1.0, w8=1.05) == first


@pytest.mark.parametrize("gain", [0.5, 3.0])
def test_changes_per_second_have_a_limit_whatever_they_promise(gain: float) -> None:
    guarded, settings = Guarded(4), GuardSettings()
    num_seconds, ms_of_request = 20, 40
    for ms in range(1000 * num_seconds):
        is_wide = ms // ms_of_request % 2
        guarded.choose(w4=1.0 + gain * (not is_wide), w8=1.0 + gain * is_wide)
    most = settings.saved_changes + settings.changes_per_s * num_seconds
    assert most / 2 <= guarded.guard.num_switches <= most


def test_a_tie_that_flickers_changes_nothing() -> None:
    guarded = Guarded(4)
    for _ in range(100):
        guarded.choose(w4=1.0, w8=1.01)
        guarded.choose(w4=1.01, w8=1.0)
    assert guarded.guard.num_switches <= 1


def test_nothing_changes_inside_the_dwell_time() -> None:
    guarded = Guarded(4)
    assert {guarded.choose(w4=1.0, w8=3.0) for _ in range(7)} == {4}


def test_every_load_has_its_own_width_and_comes_back_to_it() -> None:
    guarded = Guarded(16, rows=4)
    assert guarded.choose(40, w4=1.5, w16=1.0) == 4
    assert guarded.choose(4, w4=1.5, w16=1.0) == 16, "kept for its dwell time"
    assert guarded.choose(40, w4=1.0, w16=1.5) == 4
    assert guarded.guard.num_switches == 3


def test_a_load_that_was_away_for_long_is_chosen_for_anew() -> None:
    guarded = Guarded(16, rows=4)
    for _ in range(GuardSettings().away_steps + 1):
        guarded.choose(40, w4=1.5, w16=1.0)
    assert guarded.choose(4, w4=1.5, w16=1.0) == 4


def test_speculation_must_beat_plain_decoding_by_a_margin() -> None:
    guard = WidthGuard(GuardSettings(plain_margin=0.01))
    chosen, _ = guard.choose(options(w1=1.0, w4=1.005), 1, 1)
    assert chosen.draft_width == 1


def due_steps(
    budget: ProbeBudget, num_steps: int, losses: dict[int, float]
) -> dict[int, list[int]]:
    """Steps of the probes of each draft width."""
    found: dict[int, list[int]] = {width: [] for width in losses}
    for step in range(1, num_steps + 1):
        width = budget.due(step, losses)
        if width is not None:
            budget.spend(step, width, budget.price(losses[width]))
            found[width].append(step)
    return found


SAVING = GuardSettings(probe_rate=0.001, first_savings=0.0, probe_gap=4)


def test_the_less_a_probe_is_expected_to_lose_the_more_often_it_is_made() -> None:
    tried = due_steps(ProbeBudget(SAVING), 1000, {4: 0.05, 8: 0.25, 16: 0.5})
    assert 19 <= len(tried[4]) <= 20
    assert 3 <= len(tried[8]) <= 4
    assert len(tried[16]) <= 2


def test_a_probe_that_is_not_made_costs_nothing() -> None:
    budget = ProbeBudget(SAVING)
    assert [budget.due(step, {4: 0.05}) for step in (60, 61, 62)] == [4, 4, 4]
    budget.spend(62, 4, budget.price(0.05))
    assert budget.due(63, {4: 0.05}) is None


def test_probes_keep_apart() -> None:
    tried = due_steps(ProbeBudget(SAVING), 500, {2: 0.0, 4: 0.0, 8: 0.0})
    steps = sorted(step for mine in tried.values() for step in mine)
    assert min(b - a for a, b in pairwise(steps)) >= SAVING.probe_gap


@pytest.mark.parametrize(("cost", "gap"), [(0.0, 32), (0.2, 50), (3.0, 90)])
def test_plain_decoding_looks_around_for_a_share_of_the_time(cost: float, gap: int) -> None:
    budget = ProbeBudget(GuardSettings(plain_probe_share=0.004, plain_probe_gaps=(32, 90)))
    budget.spend(100, 4, 0.0)
    assert not budget.is_free_for_few(100 + gap - 1, cost)
    assert budget.is_free_for_few(100 + gap, cost)
    budget.spend(100 + gap, 4, 0.0)
    budget.found(True)
    assert budget.is_free_for_few(101 + gap, cost)


def test_more_rows_look_where_a_few_have_found_something() -> None:
    budget = ProbeBudget(GuardSettings())
    assert [budget.few(rows) for rows in (1, 2, 8, 64, 256)] == [1, 2, 4, 4, 8]
    budget.found(True)
    assert [budget.few(rows) for rows in (1, 8, 64, 256)] == [1, 8, 16, 32]
    budget.found(True)
    assert budget.few(256) == 128
    budget.found(False)
    assert budget.few(256) == 8
