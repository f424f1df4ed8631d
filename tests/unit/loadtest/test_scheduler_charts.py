"""The load step's figures, and the pictures of both."""

from __future__ import annotations

import asyncio
from pathlib import Path
from xml.etree import ElementTree

import pytest

from loadtest.load_step import MetricsSampler, Sample, StepRun, render_steps
from loadtest.metrics_reader import MetricsReader
from loadtest.scheduler_charts import draw_load_step, draw_matrix
from loadtest.scheduler_report import MatrixCell, Share

PHASES = ((1, 2.0), (32, 2.0), (1, 2.0))


def run(policy: str, width: float | None) -> StepRun:
    """A run that takes 100 tokens/s for the first half of each phase and 300 for the second."""
    samples = [Sample(n / 2, 300.0 if n % 4 in (3, 0) else 100.0, width) for n in range(1, 13)]
    return StepRun(policy, PHASES, tuple(samples))


def words(path: Path) -> set[str | None]:
    """All texts of a picture."""
    texts = ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
    return {(text.text or "").strip() for text in texts}


def test_only_the_settled_end_of_a_phase_counts() -> None:
    assert run("off", None).settled_tokens_per_s() == [300.0, 300.0, 300.0]
    assert StepRun("off", PHASES, ()).settled_tokens_per_s() == [0.0, 0.0, 0.0]
    assert "300" in render_steps([run("off", None)])


class GrowingMetrics(MetricsReader):
    """Counters that grow by the same at every look."""

    def __init__(self) -> None:
        self.num_reads = 0

    def read(self) -> dict[str, float]:
        self.num_reads += 1
        growth = {"dflash_committed_tokens_total": 30, "dflash_block_width_sum": 40}
        widths = {"dflash_block_width_count": 10 if self.num_reads > 2 else 0}
        return {name: self.num_reads * step for name, step in (growth | widths).items()}


@pytest.mark.asyncio
async def test_samples_are_differences_of_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.load_step.SAMPLE_PERIOD_S", 0.01)
    sampler = MetricsSampler(GrowingMetrics())
    task = asyncio.create_task(sampler.run())
    async with asyncio.timeout(30):
        while len(sampler.samples) < 4:
            await asyncio.sleep(0)
    task.cancel()
    first, *_, last = sampler.samples
    assert first.mean_width is None, "no row was scheduled"
    assert last.mean_width == pytest.approx(4.0)
    ends = [sample.end_s for sample in sampler.samples]
    assert ends == sorted(ends)
    assert last.tokens_per_s == pytest.approx(30 / (ends[-1] - ends[-2]))


def test_the_matrix_shows_every_cell(tmp_path: Path) -> None:
    share = Share(1.0, 1.0, 1.0)
    rates = {"off": 100.0, "static:4": 200.0, "adaptive": 190.0}
    cells = [
        MatrixCell(traffic, level, rates, "static:4", share, share)
        for traffic in ("code", "chat")
        for level in (1, 8)
    ]
    draw_matrix(cells, tmp_path / "new" / "matrix.svg")
    assert {"code", "chat", "adaptive", "0.95", "0.50", "1.00"} <= words(
        tmp_path / "new/matrix.svg"
    )


def test_the_load_step_shows_every_policy_and_phase(tmp_path: Path) -> None:
    path = tmp_path / "step.svg"
    draw_load_step([run("off", None), run("adaptive", 3.0)], path)
    assert {"off", "adaptive", "1", "32", "tokens/s"} <= words(path)
    again = tmp_path / "again.svg"
    draw_load_step([run("off", None), run("adaptive", 3.0)], again)
    assert again.read_bytes() == path.read_bytes(), "the same figures give the same file"
