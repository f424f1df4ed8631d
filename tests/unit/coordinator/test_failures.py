"""A failed step ends the requests that were in it; the loop and the others go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from coordinator_fakes import Bench, Sabotage, make_limits, make_request
from toy_target import always_wrong

from dflash_wire.errors import (
    DFlashError,
    EngineUnavailableError,
    ExecutorsReplacedError,
    FatalError,
    InvalidRequestError,
    error_from_wire,
    error_to_wire,
)
from dflash_wire.records import StepPlan, StepResult
from gateway.coordinator import coordinator as coordinator_module
from gateway.coordinator.commit import commit_row
from gateway.coordinator.planner import Planner
from gateway.coordinator.sequence import MOST_LOSSES
from gateway.coordinator.widths import WidthChooser


def raising(error: Exception) -> Sabotage:
    def sabotage(plan: StepPlan, result: StepResult) -> StepResult:
        raise error

    return sabotage


def reporting(error: Exception) -> Sabotage:
    return lambda plan, result: replace(result, error=error_to_wire(error))


def with_rows(change: Callable[[list[list[int]]], list[list[int]]]) -> Sabotage:
    return lambda plan, result: replace(
        result, committed_token_ids=change(result.committed_token_ids)
    )


SABOTAGES: dict[str, tuple[Sabotage, type[DFlashError]]] = {
    "ring is gone": (raising(EngineUnavailableError("verifier lost")), EngineUnavailableError),
    "ring bug": (raising(KeyError("x")), FatalError),
    "ring blames the client": (raising(InvalidRequestError("no")), FatalError),
    "reported, retryable": (reporting(EngineUnavailableError("gone")), EngineUnavailableError),
    "reported, fatal": (reporting(ValueError("nan")), FatalError),
    "too few rows": (with_rows(lambda rows: rows[:-1]), FatalError),
    "too many rows": (with_rows(lambda rows: [*rows, [1]]), FatalError),
    "nothing committed": (with_rows(lambda rows: [[], *rows[1:]]), FatalError),
    "too many tokens": (with_rows(lambda rows: [[1] * 5, *rows[1:]]), FatalError),
    "not a list": (with_rows(lambda rows: [None, *rows[1:]]), FatalError),  # type: ignore[list-item]
    "wrong step": (lambda plan, result: replace(result, step_id=plan.step_id + 1), FatalError),
    "no result": (lambda plan, result: None, FatalError),  # type: ignore[return-value,dict-item]
}


@pytest.mark.parametrize("name", SABOTAGES)
def test_failed_step(name: str) -> None:
    sabotage, error_class = SABOTAGES[name]
    # One verify row of width 4 fits a step of 4 positions: "b" and "c" have no row in the bad step.
    bench = Bench(make_limits(max_step_positions=4, max_draft_block_size=4), always_wrong)
    for i, request_id in enumerate("abc"):
        bench.submit(make_request(request_id, 3, 9, seed=i))
    while not all(bench.sink.tokens(request_id) for request_id in "abc"):
        bench.step()
    bench.ring.sabotage = sabotage
    bench.step()
    victims = {row.seq_id for row in bench.ring.plans[-1].rows}
    assert len(victims) == 1
    victim = "abc"[victims.pop()]
    wire = bench.sink.last(victim).error
    assert wire is not None
    assert type(error_from_wire(wire)) is error_class
    totals = bench.coordinator.snapshot().totals
    assert (totals.num_failed_steps, totals.num_failed_requests) == (1, 1)
    assert totals.last_error
    # The ring lost its pools: the others can only finish right if they prefill again.
    del bench.requests[victim]
    bench.submit(make_request("d", 6, 9, seed=4))
    bench.run_until_idle()
    bench.check_all_finished()


def test_prefill_that_samples_nothing_fails_the_step() -> None:
    bench = Bench()
    bench.submit(make_request("r"))
    bench.ring.sabotage = with_rows(lambda rows: [[]])
    bench.step()
    assert bench.sink.last("r").error is not None
    bench.check_empty()


def test_chunk_that_samples_fails_the_step() -> None:
    bench = Bench(make_limits(max_step_positions=16))
    bench.submit(make_request("r", 30))
    bench.ring.sabotage = with_rows(lambda rows: [[7]])
    bench.step()
    assert bench.sink.last("r").error is not None
    bench.check_empty()


def test_cancelled_during_a_failing_step_stays_silent() -> None:
    bench = Bench()
    bench.submit(make_request("r"))
    bench.ring.on_run = lambda plan: bench.coordinator.cancel("r")
    bench.ring.sabotage = raising(EngineUnavailableError("gone"))
    bench.step()
    assert bench.sink.chunks == {}
    bench.check_empty()


def test_error_in_planning_one_request_ends_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(make_limits(max_rows=3))
    for i in range(3):
        bench.submit(make_request(f"r{i}", seed=i))
    bench.step()
    width = WidthChooser._fixed_width

    def broken_width(self: WidthChooser, sequence: object, num_verify_rows: int) -> int | None:
        if sequence.seq_id == 1:  # type: ignore[attr-defined]
            raise ZeroDivisionError("width")
        return width(self, sequence, num_verify_rows)  # type: ignore[arg-type]

    monkeypatch.setattr(WidthChooser, "_fixed_width", broken_width)
    bench.run_until_idle()
    wire = bench.sink.last("r1").error
    assert wire is not None and isinstance(error_from_wire(wire), FatalError)
    del bench.requests["r1"]
    bench.check_all_finished()


@pytest.mark.parametrize("width", [0, 17])
def test_policy_out_of_range_ends_its_request(width: int) -> None:
    bench = Bench()
    bench.submit(make_request("r"))
    bench.step()
    (sequence,) = bench.coordinator._planner.running.values()

    class Wild:
        name = "wild"

        def width(self, stats: object, num_verify_rows: int) -> int:
            return width

    sequence.policy = Wild()
    bench.run_until_idle()
    assert bench.sink.last("r").error is not None
    bench.check_empty()


def test_error_in_committing_one_request_ends_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    for i in range(3):
        bench.submit(make_request(f"r{i}", seed=i))

    def broken_commit(sequence: object, *args: object) -> object:
        if sequence.seq_id == 1:  # type: ignore[attr-defined]
            raise ZeroDivisionError("commit")
        return commit_row(sequence, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(coordinator_module, "commit_row", broken_commit)
    bench.run_until_idle()
    assert bench.sink.last("r1").error is not None
    del bench.requests["r1"]
    bench.check_all_finished()


def test_error_in_the_loop_itself_ends_all_and_serves_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(make_limits(max_rows=1))
    bench.submit(make_request("running"))
    bench.submit(make_request("waiting"))
    bench.step()
    with monkeypatch.context() as patch:
        patch.setattr(Planner, "_take_ingests", raising(RuntimeError("bug")))
        bench.step()
    for request_id in ("running", "waiting"):
        assert bench.sink.last(request_id).error is not None
    bench.check_empty()
    bench.requests.clear()
    bench.submit(make_request("next"))
    bench.run_until_idle()
    bench.check_all_finished()


def test_lost_pages_do_not_hang_the_loop() -> None:
    bench = Bench()
    bench.submit(make_request("r"))
    bench.coordinator._planner.pages.ensure(999, 256 * 4)
    bench.coordinator.step()
    assert bench.sink.last("r").error is not None
    bench.check_empty()


def test_failing_sink_ends_the_requests_that_lost_tokens() -> None:
    bench = Bench()
    bench.submit(make_request("r"))
    failures = [OSError("full")]

    def fail_once() -> None:
        if failures:
            raise failures.pop()

    bench.sink.on_publish = fail_once
    bench.run_until_idle()
    assert bench.sink.last("r").error is not None
    assert bench.sink.tokens("r") == []
    bench.check_empty()
    bench.requests.clear()
    bench.submit(make_request("next"))
    bench.run_until_idle()
    bench.check_all_finished()


REPLACED = ExecutorsReplacedError("an executor was lost; all have been replaced")


@pytest.mark.parametrize("cohorts", [1, 2])
def test_replaced_executors_end_no_request(cohorts: int) -> None:
    bench = Bench(make_limits(max_step_positions=24), cohorts=(cohorts,))
    for i in range(6):
        bench.submit(make_request(f"r{i}", 9, 30, seed=i, family=i % 2))
    for _ in range(MOST_LOSSES):
        for _ in range(4):
            bench.step()
        bench.ring.sabotage = raising(REPLACED)
    bench.run_until_idle()
    bench.check_all_finished()
    totals = bench.coordinator.snapshot().totals
    assert (totals.num_failed_steps, totals.num_failed_requests) == (MOST_LOSSES, 0)


def test_executors_that_were_replaced_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was in flight, but no page holds what it did."""
    bench = Bench()
    bench.submit(make_request("first", 9, 30))
    bench.run_until_idle()
    send, losses = bench.ring.send, [REPLACED]

    def send_or_tell(plan: StepPlan) -> None:
        if losses:
            bench.ring.lose_everything()
            raise losses.pop()
        send(plan)

    monkeypatch.setattr(bench.ring, "send", send_or_tell)
    bench.submit(make_request("second", 9, 30))  # begins as the first did
    bench.run_until_idle()
    bench.check_all_finished()
    assert bench.sink.chunks["second"][0].num_cached_tokens == 8


def test_a_request_that_comes_along_with_every_loss_ends() -> None:
    bench = Bench()
    bench.submit(make_request("poison", 9, 30))
    for num_losses in range(MOST_LOSSES + 1):
        assert bench.sink.chunks.get("poison", [])[num_losses:] == []
        bench.ring.sabotage = raising(REPLACED)
        bench.step()
    wire = bench.sink.last("poison").error
    assert wire is not None and isinstance(error_from_wire(wire), FatalError)
    bench.check_empty()
