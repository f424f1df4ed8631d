"""Outstanding tokens: what a coordinator says it still has to do."""

from __future__ import annotations

import pytest
from coordinator_fakes import Bench, make_limits, make_request
from toy_target import always_wrong

from gateway.coordinator.outstanding import outstanding_tokens

pytestmark = pytest.mark.unit

EXPECTED = 20


@pytest.mark.parametrize(
    ("num_to_prefill", "num_may_commit", "wanted"), [(100, 5, 105), (100, 500, 120), (0, 20, 20)]
)
def test_output_is_clipped_by_what_is_allowed(
    num_to_prefill: int, num_may_commit: int, wanted: int
) -> None:
    assert outstanding_tokens(num_to_prefill, num_may_commit, EXPECTED) == wanted


def test_work_shrinks_as_prompts_are_read_and_outputs_end() -> None:
    bench = Bench(make_limits(max_step_positions=16), always_wrong, "off")

    def outstanding() -> int:
        return bench.coordinator.outstanding_tokens(EXPECTED)

    assert outstanding() == 0
    bench.submit(make_request("r", 40, 24))
    assert outstanding() == 40 + EXPECTED  # still in the inbox
    seen = []
    while bench.step():
        seen.append(outstanding())
    # Three chunks, of which the last one samples; 20 of 23 are expected, and then what is left.
    assert seen[:3] == [24 + EXPECTED, 8 + EXPECTED, EXPECTED]
    assert seen[3:] == [EXPECTED] * 3 + list(range(EXPECTED - 1, -1, -1))


def test_waiting_and_preempted_sequences_count_whole() -> None:
    bench = Bench(make_limits(max_rows=1, max_step_positions=16), always_wrong, "off")
    bench.submit(make_request("runs", 10, 50))
    bench.submit(make_request("waits", 30, 5))
    bench.step()
    assert bench.coordinator.outstanding_tokens(EXPECTED) == EXPECTED + 35
    bench.coordinator._planner.preempt_all()
    assert bench.coordinator.outstanding_tokens(EXPECTED) == 11 + EXPECTED + 35
    bench.run_until_idle()
    assert bench.coordinator.outstanding_tokens(EXPECTED) == 0
