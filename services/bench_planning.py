"""What the coordinator itself costs per step: ``make bench-planning``.

The real coordinator drives a ring that answers at once, with rows of mixed widths, prefixes half shared
and the prefix cache on. Times are CPU time of the driving thread, medians over steps in ms, so a busy
machine hardly changes them:

    plan      taking the inbox, choosing rows, pages and page tables
    commit    checking and clipping the result, moving anchors, naming full pages
    publish   building one token frame, as it goes to a gateway
    encode    the plan as msgpack, on its way to the drafter or the verifier
    decode    reading it there; each executor does it once

Prints one table and ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from dflash_wire.codec import decode_plan, encode_chunks, encode_plan
from dflash_wire.ports import EngineLimits
from dflash_wire.records import GenerationRequest, StepPlan, StepResult, TokenChunk
from dflash_wire.sampling import SamplingParams
from gateway.coordinator import Coordinator
from services.local import ONE_AFTER_ANOTHER

BAR_MS = 0.5
"""Planning and committing together, at 32 rows."""
POLICIES = ("off", "static:2", "static:4", "static:8", "static:16")
PAGE_SIZE = 16
MAX_OUTPUT = 4096
NUM_ACCEPTED = 3
WARM_STEPS = 30


@dataclass(frozen=True, slots=True)
class PlanningCost:
    """Medians per step, in ms of CPU time."""

    num_rows: int
    num_prompt: int
    """Prompt tokens of every row; its output is added while it is measured."""
    plan_ms: float
    commit_ms: float
    publish_ms: float
    encode_ms: float
    decode_ms: float
    plan_bytes: int

    @property
    def coordinator_ms(self) -> float:
        """What the bar is about."""
        return self.plan_ms + self.commit_ms


class InstantRing:
    """``StepRing`` without models: every verify row accepts up to three drafts.

    Its answer is computed while the coordinator waits for it, so that it counts as the ring's time.
    """

    def __init__(self) -> None:
        self.plan = StepPlan(-1, [])
        """The last step's."""

    def send(self, plan: StepPlan) -> None:
        """Take the step."""
        self.plan = plan

    def receive(self, step_id: int) -> StepResult:
        """Answer the step that was sent last."""
        committed = [
            [1] * (int(row.samples) if row.is_prefill else min(NUM_ACCEPTED + 1, row.width))
            for row in self.plan.rows
        ]
        return StepResult(step_id, committed)

    @property
    def num_decoding(self) -> int:
        """Verify rows of the last step."""
        return sum(not row.is_prefill for row in self.plan.rows)


class EncodingSink:
    """``TokenSink`` that builds the frames and measures that."""

    def __init__(self) -> None:
        self.publish_ms = 0.0

    def publish(self, chunks: dict[str, list[TokenChunk]]) -> None:
        """Encode one frame per gateway."""
        began = time.thread_time()
        for mine in chunks.values():
            encode_chunks(mine)
        self.publish_ms = 1e3 * (time.thread_time() - began)


def make_requests(num_rows: int, num_prompt: int) -> list[GenerationRequest]:
    """Prompts that share their first half, with policies of every width in turn."""
    shared = [7 * i % 1000 for i in range(num_prompt // 2)]
    return [
        GenerationRequest(
            f"r{row}",
            [*shared, *((13 * row + i) % 1000 for i in range(num_prompt - len(shared)))],
            MAX_OUTPUT,
            SamplingParams(temperature=0.8, seed=row),
            [2],
            POLICIES[row % len(POLICIES)],
            frame_address="gateway",
        )
        for row in range(num_rows)
    ]


def start_decoding(num_rows: int, num_prompt: int) -> tuple[Coordinator, InstantRing, EncodingSink]:
    """Return a coordinator all of whose rows are past their prompts."""
    pages_per_row = -(-(num_prompt + MAX_OUTPUT) // PAGE_SIZE)
    limits = EngineLimits(
        num_pages=num_rows * pages_per_row,
        page_size=PAGE_SIZE,
        max_step_positions=2048,
        max_rows=num_rows,
        max_context=pages_per_row * PAGE_SIZE,
        max_draft_block_size=16,
    )
    ring, sink = InstantRing(), EncodingSink()
    coordinator = Coordinator(
        ring, sink, limits, "off", clock=time.thread_time, cohorts=ONE_AFTER_ANOTHER
    )
    for request in make_requests(num_rows, num_prompt):
        coordinator.submit(request)
    while ring.num_decoding < num_rows:
        coordinator.step()
    for _ in range(WARM_STEPS):
        coordinator.step()
    return coordinator, ring, sink


def measure(num_rows: int, num_prompt: int, num_steps: int) -> PlanningCost:
    """Measure ``num_steps`` steps in which every row decodes.

    Raises:
        ValueError: so many steps would end the sequences.
    """
    if (WARM_STEPS + num_steps + num_rows) * (NUM_ACCEPTED + 1) > MAX_OUTPUT:
        raise ValueError(f"{num_steps} steps of {num_rows} rows are too many")
    coordinator, ring, sink = start_decoding(num_rows, num_prompt)
    samples: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        samples.setdefault(name, []).append(value)

    frame = b""
    for _ in range(num_steps):
        before = coordinator.snapshot().totals
        coordinator.step()
        after = coordinator.snapshot().totals
        note("plan_ms", after.plan_ms - before.plan_ms)
        note("commit_ms", after.commit_ms - before.commit_ms)
        note("publish_ms", sink.publish_ms)
        began = time.thread_time()
        frame = encode_plan(ring.plan)
        encoded = time.thread_time()
        decode_plan(frame)
        note("encode_ms", 1e3 * (encoded - began))
        note("decode_ms", 1e3 * (time.thread_time() - encoded))
    medians = {name: round(statistics.median(values), 4) for name, values in samples.items()}
    return PlanningCost(num_rows, num_prompt, **medians, plan_bytes=len(frame))


def render(costs: Sequence[PlanningCost]) -> str:
    """Return the table and the JSON line."""
    names = ("plan_ms", "commit_ms", "publish_ms", "encode_ms", "decode_ms")
    lines = [f"{'rows':>5}{'prompt':>8}" + "".join(f"{n[:-3] + ' ms':>12}" for n in names)]
    lines[0] += f"{'plan bytes':>12}"
    for cost in costs:
        values = "".join(f"{getattr(cost, name):>12.3f}" for name in names)
        lines.append(f"{cost.num_rows:>5}{cost.num_prompt:>8}{values}{cost.plan_bytes:>12}")
    worst = max(cost.coordinator_ms for cost in costs)
    report = {
        "costs": [asdict(cost) for cost in costs],
        "bar": f"plan + commit <= {BAR_MS} ms per step",
        "worst_ms": round(worst, 4),
        "bar_met": worst <= BAR_MS,
    }
    return "\n".join([*lines, json.dumps(report)])


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(prog="python -m services.bench_planning", description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompts", default="300,2000", help="prompt lengths in tokens")
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    lengths = [int(length) for length in options.prompts.split(",")]
    try:
        print(render([measure(options.rows, length, options.steps) for length in lengths]))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
