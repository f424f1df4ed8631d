"""Prices: a table, what lies between its entries, and what served steps teach."""

from __future__ import annotations

import numpy as np
import pytest

from gateway.coordinator.block_scheduler.cost import StepCostModel
from gateway.coordinator.block_scheduler.cost_table import CostSample, CostTable
from gateway.coordinator.block_scheduler.records import TREES, Decision, StepOutcome

NO_DECISION = Decision(0, 1, [], 0.0, 0.0, "plain", "")


def true_ms(rows: int, width: int, context: int = 0) -> tuple[float, float, float]:
    draft = 0.0 if width == 1 else 1.0 + 0.05 * rows + 0.01 * rows * width
    verify = 2.0 + 0.1 * rows + 0.08 * rows * width + context / 1000
    return draft, verify, draft + verify + 0.5


def sweep(contexts: tuple[int, ...] = (0,)) -> list[CostSample]:
    return [
        CostSample(rows, width, context, *true_ms(rows, width, context))
        for rows in (1, 4, 16, 64)
        for width in (1, 4, 8, 16)
        for context in contexts
    ]


def landed(
    rows: int,
    width: int,
    step_ms: float | None,
    prefill: int = 0,
    cohorts: int = 1,
    decision: Decision | None = NO_DECISION,
) -> StepOutcome:
    return StepOutcome(
        decision, [], rows, rows * width + prefill, prefill, 0, cohorts, width, 0.0, 0.0, step_ms
    )


def price(model: StepCostModel | CostTable, rows: int, width: int, positions: int) -> float:
    return float(model.step_ms([width], rows, np.array([positions]), 0)[0, 0])


def test_noise_between_contexts_makes_no_step_free() -> None:
    samples = sweep(contexts=(50, 400))
    # The machine did something else whenever contexts were long.
    noisy = [
        s._replace(verify_ms=40 * s.verify_ms, step_ms=40 * s.step_ms) if s.context == 400 else s
        for s in samples
    ]
    model = StepCostModel(CostTable(noisy))
    for rows in (1, 4, 64):
        assert price(model, rows, 1, rows) > 0.1
        assert model.observe(landed(rows, 1, 5.0)) is not None


@pytest.mark.parametrize("rows", [1, 2, 10, 64])
@pytest.mark.parametrize("width", [1, 4, 8, 16])
def test_between_measured_rows_prices_are_linear(rows: int, width: int) -> None:
    assert price(CostTable(sweep()), rows, width, rows * width) == pytest.approx(
        true_ms(rows, width)[2], rel=0.01
    )


def test_a_trimmed_step_saves_verification_and_not_drafting() -> None:
    draft, _, _ = true_ms(16, 16)
    _, verify, _ = true_ms(16, 4)
    assert price(CostTable(sweep()), 16, 16, 16 * 4) == pytest.approx(
        draft + verify + 0.5, rel=0.01
    )


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0.0), (0.4, 0.4), (1.7, 1.0)])
def test_rows_that_differ_cost_as_if_they_were_wider(share: float, expected: float) -> None:
    (draft, wide, _), (_, even, _) = true_ms(4, 8), true_ms(4, 5)
    verify = even + share * (wide - even)
    ragged = CostSample(4, 8, 0, draft, verify, draft + verify + 0.5, other_width=2)
    table = CostTable([*sweep(), ragged])
    assert table.raggedness == pytest.approx(expected, abs=0.05)
    found = price(table, 4, 8, 4 * 5)
    assert found == pytest.approx(draft + even + expected * (wide - even) + 0.5, rel=0.02)
    assert price(table, 4, 8, 4 * 8) == pytest.approx(price(CostTable(sweep()), 4, 8, 4 * 8))


def test_context_is_priced_where_it_was_measured() -> None:
    table = CostTable(sweep(contexts=(0, 20_000)))
    assert table.ms_per_context == pytest.approx(1.0)
    near, far = (float(table.step_ms([4], 4, np.array([16]), c)[0, 0]) for c in (0, 10_000))
    assert far - near == pytest.approx(10.0)
    assert CostTable(sweep()).ms_per_context == 0.0


def test_steps_are_priced_at_the_captured_size_they_are_padded_to() -> None:
    table = CostTable(sweep(), captured_sizes=[16, 32, 64])
    assert price(table, 16, 4, 33) == price(table, 16, 4, 64)
    assert price(table, 16, 4, 32) < price(table, 16, 4, 33)
    assert price(table, 16, 8, 70) > price(table, 16, 8, 65)  # beyond the largest: as it is


def test_noise_never_makes_more_work_cheaper() -> None:
    noisy = [s._replace(verify_ms=9.0) if s.width == 4 else s for s in sweep()]
    table = CostTable(noisy)
    prices = [price(table, 4, 16, positions) for positions in range(4, 65)]
    assert prices == sorted(prices)


def test_a_cell_that_seems_too_dear_does_not_make_all_behind_it_so() -> None:
    def dear(sample: CostSample) -> CostSample:
        is_one = (sample.num_rows, sample.width) == (1, 4)
        return sample._replace(verify_ms=sample.verify_ms + 0.4) if is_one else sample

    exact, noisy = CostTable(sweep()), CostTable(map(dear, sweep()))
    for width, most in ((4, 0.4), (8, 0.05), (16, 0.0)):
        positions = np.array([width])
        verify = [float(t.step_ms([1], 1, positions, 0)[0, 0]) for t in (exact, noisy)]
        assert abs(verify[1] - verify[0]) <= most + 1e-9, width


def test_more_rows_than_measured_cost_in_proportion() -> None:
    assert price(CostTable(sweep()), 128, 4, 512) > 1.5 * price(CostTable(sweep()), 64, 4, 256)


def test_wide_rows_that_were_not_measured_cost_in_proportion() -> None:
    """A sweep that ends early has them for few rows only: they are no bargain for many."""
    partial = CostTable([s for s in sweep() if s.num_rows * s.width <= 64])
    assert price(partial, 64, 16, 1024) > 0.8 * price(CostTable(sweep()), 64, 16, 1024)


def test_wide_blocks_that_seem_cheap_give_no_time_back() -> None:
    """As noise has it, or a policy that drafts wider than anything that was measured."""
    times = {1: 1.0, 4: 6.0, 6: 1.5}
    samples = [CostSample(1, w, 0, 0.0, 1.0, 1.0 + beside) for w, beside in times.items()]
    table = CostTable(samples)
    assert price(table, 1, 6, 6) == pytest.approx(2.5)
    assert price(table, 1, 16, 16) == pytest.approx(1.0)


def test_plain_decoding_must_have_a_price() -> None:
    wide = [s for s in sweep() if s.width > 1]
    ragged = CostSample(4, 1, 0, 0.0, 2.0, 2.5, other_width=2)
    tree = CostSample(1, 1, 0, 0.5, 2.0, 3.0, tree_block=8)
    for others in ([], [ragged], [tree]):
        for samples in (others, [*wide, *others]):
            with pytest.raises(ValueError, match="plain decoding"):
                CostTable(samples)


def test_observed_steps_correct_their_cell_and_hint_at_the_others() -> None:
    model = StepCostModel(CostTable(sweep()))
    before = price(model, 16, 4, 64)
    other = price(model, 1, 1, 1)
    for _ in range(60):
        model.observe(landed(16, 4, 1.5 * before))
    assert price(model, 16, 4, 64) == pytest.approx(1.5 * before, rel=0.03)
    assert price(model, 1, 1, 1) == pytest.approx(1.5 * other, rel=0.03)
    for _ in range(60):
        model.observe(landed(1, 1, other))
    assert price(model, 1, 1, 1) == pytest.approx(other, rel=0.1)
    assert price(model, 16, 4, 64) == pytest.approx(1.5 * before, rel=0.1)


def test_one_outlier_moves_little() -> None:
    model = StepCostModel(CostTable(sweep()))
    before = price(model, 16, 4, 64)
    for _ in range(40):
        model.observe(landed(16, 4, before))
    model.observe(landed(16, 4, 100 * before))
    assert price(model, 16, 4, 64) < 1.05 * before


def test_prefill_is_priced_apart_and_does_not_touch_decoding() -> None:
    model = StepCostModel(CostTable(sweep()))
    before = price(model, 4, 1, 4)
    for _ in range(40):
        assert model.observe(landed(4, 1, before + 20.0, prefill=200)) is None
    assert price(model, 4, 1, 4) == before
    with_prefill = float(model.step_ms([1], 4, np.array([4]), 0, 200)[0, 0])
    assert with_prefill == pytest.approx(before + 20.0, rel=0.05)


@pytest.mark.parametrize("step_ms", [None, 0.0])
@pytest.mark.parametrize("prefill", [0, 8])
def test_steps_after_a_pause_or_without_time_teach_nothing(
    step_ms: float | None, prefill: int
) -> None:
    model = StepCostModel(CostTable(sweep()))
    before = price(model, 4, 1, 4)
    assert model.observe(landed(4, 1, step_ms, prefill)) is None
    assert price(model, 4, 1, 4) == before
    assert float(model.step_ms([1], 4, np.array([4]), 0, 200)[0, 0]) == before


def test_cohorts_have_prices_of_their_own() -> None:
    model = StepCostModel(CostTable(sweep()))
    before = price(model, 16, 4, 64)
    for _ in range(60):
        model.observe(landed(16, 4, before))
        model.observe(landed(16, 4, 0.6 * before, cohorts=2))
    two = float(model.step_ms([4], 16, np.array([64]), 0, 0, 2)[0, 0])
    assert two == pytest.approx(0.6 * before, rel=0.1)
    assert price(model, 16, 4, 64) == pytest.approx(before, rel=0.1)


def test_trees_have_a_price_of_their_own() -> None:
    trees = []
    for rows in (1, 4, 16):
        draft, verify, _ = true_ms(rows, 12)
        step_ms = draft + verify + 0.5 + 0.3 * rows
        trees.append(CostSample(rows, 12, 0, draft, verify, step_ms, 0, 16))
    table = CostTable([*sweep(), *trees])
    for rows in (1, 4, 16):
        draft, verify, _ = true_ms(rows, 12)
        whole = draft + verify + 0.5 + 0.3 * rows
        assert price(table, rows, TREES + 16, rows * 12) == pytest.approx(whole, rel=0.02)
        assert price(table, rows, 16, rows * 12) == pytest.approx(
            price(CostTable(sweep()), rows, 16, rows * 12)
        )
        assert price(table, rows, TREES + 8, rows * 12) == price(table, rows, 8, rows * 12)


def test_a_power_of_two_shares_corrections_with_the_rows_below_it() -> None:
    model = StepCostModel(CostTable(sweep()))
    model.observe(landed(20, 4, price(model, 20, 4, 80)))  # of another load, which stays as it is
    for _ in range(60):
        model.observe(landed(16, 4, 1.5 * price(StepCostModel(CostTable(sweep())), 16, 4, 64)))
    model.observe(landed(20, 4, price(model, 20, 4, 80)))  # the last level is that load's again
    fresh = StepCostModel(CostTable(sweep()))
    assert price(model, 15, 4, 60) == pytest.approx(1.5 * price(fresh, 15, 4, 60), rel=0.03)
    assert price(model, 17, 4, 68) == pytest.approx(price(fresh, 17, 4, 68), rel=0.03)


class Machine:
    """Steps of 16 rows that take what the table says, times a level, and ``wide`` times more if they are 16
    wide."""

    def __init__(self, wide: float = 1.0) -> None:
        self.table, self.model = CostTable(sweep()), StepCostModel(CostTable(sweep()))
        self.level, self._wide = 1.0, wide

    def land(self, width: int, num_steps: int, decision: Decision | None = NO_DECISION) -> None:
        factor = self.level * (self._wide if width == 16 else 1.0)
        ms = factor * price(self.table, 16, width, 16 * width)
        for _ in range(num_steps):
            self.model.observe(landed(16, width, ms, decision=decision))

    @property
    def contrast(self) -> float:
        """By how much blocks of 16 are thought to cost more, beside blocks of 4, than the table says."""
        wide, narrow = (
            price(self.model, 16, width, 16 * width) / price(self.table, 16, width, 16 * width)
            for width in (16, 4)
        )
        return wide / narrow


def test_changes_of_the_width_teach_what_a_width_costs() -> None:
    machine = Machine(wide=1.3)
    for _ in range(100):
        machine.land(4, 20)
        machine.land(16, 2)
    assert machine.contrast == pytest.approx(1.3, rel=0.05)


@pytest.mark.parametrize("between", ["another load", "a pause", "steps of a fixed width"])
def test_a_machine_that_changed_meanwhile_is_not_held_against_a_width(between: str) -> None:
    machine = Machine()
    for turn in range(30):
        machine.level = 1.0 + 0.3 * (turn % 2)
        if between == "another load":
            machine.model.observe(landed(1, 4, 4.0))
        elif between == "a pause":
            machine.model.observe(landed(16, 4, None))
        is_asked = between != "steps of a fixed width"
        machine.land(16 if turn % 2 else 4, 20, NO_DECISION if is_asked else None)
    assert machine.contrast == pytest.approx(1.0, abs=0.02)
