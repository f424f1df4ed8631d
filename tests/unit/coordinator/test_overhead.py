"""Planning and committing must stay small beside a model pass."""

from __future__ import annotations

import statistics
import time

from coordinator_fakes import make_limits, make_request
from recording_sink import RecordingSink

from dflash_wire.records import StepPlan, StepResult
from gateway.coordinator import Coordinator

NUM_ROWS = 32
BOUND_MS = 5.0
"""Generous: a loaded CI machine takes several times the usual 0.2 ms."""


class InstantRing:
    """Accepts three drafts of every verify row and notes how long it was away."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def send(self, plan: StepPlan) -> None:
        self.plan = plan

    def receive(self, step_id: int) -> StepResult:
        started, plan = time.perf_counter(), self.plan
        committed = [
            [1] * (min(4, row.width) if not row.is_prefill else int(row.samples))
            for row in plan.rows
        ]
        self.seconds = time.perf_counter() - started
        return StepResult(plan.step_id, committed)


def test_step_overhead_at_32_rows() -> None:
    limits = make_limits(
        num_pages=32_768, page_size=16, max_rows=NUM_ROWS, max_step_positions=2048, max_context=4096
    )
    ring = InstantRing()
    coordinator = Coordinator(ring, RecordingSink(), limits, "static:16", cohorts=(1,))
    for i in range(NUM_ROWS):
        coordinator.submit(make_request(f"r{i}", 1000, 3000))
    while coordinator.snapshot().totals.num_cycles < NUM_ROWS * NUM_ROWS:
        coordinator.step()
    samples_ms: list[float] = []
    for _ in range(200):
        started = time.perf_counter()
        assert coordinator.step()
        samples_ms.append(1e3 * (time.perf_counter() - started - ring.seconds))
    median = statistics.median(samples_ms)
    print(f"\nplan + commit, {NUM_ROWS} rows: median {median:.3f}, max {max(samples_ms):.3f} ms")
    assert coordinator.snapshot().num_running == NUM_ROWS
    assert median < BOUND_MS
