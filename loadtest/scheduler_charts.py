"""Pictures of what the block scheduler does: the regret matrix, and a load that rises and falls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.bench_report import PLAIN
from loadtest.load_step import Sample, StepRun
from loadtest.pictures import save_svg, svg_style
from loadtest.scheduler_report import JUDGED, MatrixCell

SHARE_RANGE = (0.5, 1.0)
"""Shares of the best policy from the palest to the fullest colour."""


def draw_matrix(matrix: Sequence[MatrixCell], path: Path) -> None:
    """Write one panel per traffic: throughput of every policy at every level, over the best static one's."""
    traffics = list(dict.fromkeys(cell.traffic for cell in matrix))
    with svg_style():
        figure = Figure(figsize=(3.4 * len(traffics), 3.2), layout="constrained")
        panels = figure.subplots(1, len(traffics), squeeze=False, sharey=True)[0]
        for axes, traffic in zip(panels, traffics, strict=True):
            _matrix_panel(axes, traffic, [cell for cell in matrix if cell.traffic == traffic])
        figure.suptitle("Throughput over that of the cell's best fixed width (framed)")
        save_svg(figure, path)


def _matrix_panel(axes: Axes, traffic: str, cells: Sequence[MatrixCell]) -> None:
    policies = list(cells[0].tokens_per_s)
    shares = [
        [cell.tokens_per_s[policy] / cell.tokens_per_s[cell.best_static] for cell in cells]
        for policy in policies
    ]
    low, high = SHARE_RANGE
    axes.imshow(shares, cmap="Greens", vmin=low, vmax=high + 0.2, aspect="auto")
    for row, policy in enumerate(policies):
        for column, cell in enumerate(cells):
            is_best = policy == cell.best_static
            frame = {"edgecolor": "black", "facecolor": "none", "pad": 2.0} if is_best else None
            axes.text(
                column, row, f"{shares[row][column]:.2f}", ha="center", va="center", bbox=frame
            )
    axes.set_xticks(range(len(cells)), [str(cell.num_streams) for cell in cells])
    axes.set_yticks(range(len(policies)), policies)
    axes.set_title(traffic)
    axes.set_xlabel("streams")


def draw_load_step(runs: Sequence[StepRun], path: Path) -> None:
    """Write two panels over time: tokens/s of every policy, and the mean verify width of the scheduler."""
    with svg_style():
        figure = Figure(figsize=(8, 5), layout="constrained")
        speed, width = figure.subplots(2, 1, sharex=True)
        for run in runs:
            is_judged = run.policy == JUDGED
            speed.plot(
                *_series(run, lambda s: s.tokens_per_s),
                label=run.policy,
                linewidth=2.0 if is_judged else 1.0,
                color="tab:green" if is_judged else "grey" if run.policy == PLAIN else None,
            )
            if is_judged:
                width.plot(*_series(run, lambda s: s.mean_width), color="tab:green")
        for axes in (speed, width):
            _mark_phases(axes, runs[0])
        speed.set_ylabel("tokens/s")
        speed.legend(loc="upper left", ncols=len(runs))
        speed.set_ylim(bottom=0)
        width.set_ylabel(f"verified positions per row, {JUDGED}")
        width.set_ylim(bottom=0)
        width.set_xlabel("seconds")
        figure.suptitle("One stream, many, and one again")
        save_svg(figure, path)


def _series(
    run: StepRun, value: Callable[[Sample], float | None]
) -> tuple[list[float], list[float]]:
    points = [(s.end_s, found) for s in run.samples if (found := value(s)) is not None]
    return [at for at, _ in points], [found for _, found in points]


def _mark_phases(axes: Axes, run: StepRun) -> None:
    begin_s = 0.0
    for num_streams, length_s in run.phases:
        axes.axvline(begin_s, color="grey", linewidth=0.5, linestyle=":")
        axes.text(begin_s, 1.0, f" {num_streams}", transform=axes.get_xaxis_transform(), va="top")
        begin_s += length_s
