"""A load that rises at once and falls at once, watched through the server's metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from loadtest.bench_report import aligned_table
from loadtest.closed_loop import ClosedLoop
from loadtest.metrics_reader import MetricsReader

SAMPLE_PERIOD_S = 0.25
SETTLED = 0.5
"""The end of a phase over which its throughput counts, as a share of it."""

Phase = tuple[int, float]
"""Streams, and for how many seconds."""


@dataclass(frozen=True)
class Sample:
    """What happened since the sample before."""

    end_s: float
    """Since the run began."""
    tokens_per_s: float
    """Committed by cycles of all requests."""
    mean_width: float | None
    """Verified positions of rows whose width the scheduler chose; None when there were none."""


@dataclass(frozen=True)
class StepRun:
    """One policy's run through all phases."""

    policy: str
    phases: tuple[Phase, ...]
    samples: tuple[Sample, ...]

    def settled_tokens_per_s(self) -> list[float]:
        """Return the mean throughput over the end of each phase."""
        means, begin_s = [], 0.0
        for _, length_s in self.phases:
            end_s = begin_s + length_s
            first_s = end_s - SETTLED * length_s
            mine = [s.tokens_per_s for s in self.samples if first_s < s.end_s <= end_s]
            means.append(mean(mine) if mine else 0.0)
            begin_s = end_s
        return means


class MetricsSampler:
    """Samples a server's counters until it is cancelled. Owner: one run."""

    def __init__(self, reader: MetricsReader) -> None:
        self._reader = reader
        self.samples: list[Sample] = []

    async def run(self) -> None:
        """Append a sample every ``SAMPLE_PERIOD_S``; never ends by itself.

        Raises:
            BenchError: the server does not answer.
        """
        began_s = last_s = time.perf_counter()
        last = await asyncio.to_thread(self._reader.read)
        while True:
            await asyncio.sleep(SAMPLE_PERIOD_S)
            now = await asyncio.to_thread(self._reader.read)
            now_s = time.perf_counter()
            self.samples.append(_difference(last, now, last_s - began_s, now_s - began_s))
            last, last_s = now, now_s


def _difference(
    before: dict[str, float], after: dict[str, float], begin_s: float, end_s: float
) -> Sample:
    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    num_rows = grown("dflash_block_width_count")
    return Sample(
        end_s=end_s,
        tokens_per_s=grown("dflash_committed_tokens_total") / (end_s - begin_s),
        mean_width=grown("dflash_block_width_sum") / num_rows if num_rows > 0 else None,
    )


async def run_load_step(
    lasting: ClosedLoop,
    passing: ClosedLoop,
    reader: MetricsReader,
    policy: str,
    num_streams: tuple[int, int],
    phase_s: float,
) -> StepRun:
    """Run few streams, many, and few again; the streams between leave at once, answers unfinished.

    Args:
        lasting: the streams that are there all the time.
        passing: those that come for the second phase.
        reader: of the server's metrics.
        policy: of all requests.
        num_streams: few and many.
        phase_s: length of each of the three phases.

    Raises:
        BenchError: a request failed, or the metrics cannot be read.
    """
    few, many = num_streams
    sampler = MetricsSampler(reader)
    async with asyncio.TaskGroup() as group:
        sampling = group.create_task(sampler.run())
        stay = group.create_task(lasting.run(policy, few, 0.0, 3 * phase_s))
        await asyncio.sleep(phase_s)
        try:
            async with asyncio.timeout(phase_s):
                await passing.run(policy, many - few, 0.0, 2 * phase_s)
        except TimeoutError:
            pass  # the end of their phase
        await stay
        sampling.cancel()
    phases = ((few, phase_s), (many, phase_s), (few, phase_s))
    return StepRun(policy, phases, tuple(sampler.samples))


def render_steps(runs: Sequence[StepRun]) -> str:
    """Return the settled throughput of each phase as a table."""
    header = ["policy", *(f"{streams} streams" for streams, _ in runs[0].phases)]
    lines = [[run.policy, *(f"{v:.0f}" for v in run.settled_tokens_per_s())] for run in runs]
    return "tokens/s at the end of each phase\n" + aligned_table([header, *lines])
