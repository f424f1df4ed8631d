"""Draws what ``services.bench_step_cost`` has measured: ``make bench-step-cost`` does both."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from loadtest.pictures import save_svg, svg_style

USUAL_CONTEXT = 256
CONTEXT_SHAPES = ((1, 1), (1, 8), (8, 1), (8, 8))
"""(rows, width) of the lines against context."""
WIDTH_ROWS = (1, 8, 32)
"""Rows of the lines against width."""

Figures = dict[tuple[int, tuple[int, ...], int], dict[str, float]]
"""By rows, the widths they get in turn, and context: times in ms."""


def read_figures(report: dict[str, Any]) -> Figures:
    """Return the report's cells by what they are."""
    return {
        (cell["cell"]["num_rows"], tuple(cell["cell"]["widths"]), cell["cell"]["context"]): cell
        for cell in report["cells"]
    }


def draw(report: dict[str, Any]) -> Figure:
    """The picture: step time against rows, width, context and positions, all axes logarithmic."""
    figures = read_figures(report)
    note = (
        f"{report['model']}, {report['dtype']}, {report['num_threads']} thread(s); drafter and verifier "
        f"pass one after the other, median of {report['repeats']} rounds"
    )
    with svg_style():
        figure = Figure(figsize=(9, 8), layout="constrained")
        (rows, width), (context, positions) = figure.subplots(2, 2)
        _against_rows(rows, figures)
        _against_width(width, figures)
        _against_context(context, figures)
        _against_positions(positions, figures)
        figure.suptitle(f"What a step costs\n{note}", fontsize=10)
    return figure


def _uniform(figures: Figures, context: int = USUAL_CONTEXT) -> dict[tuple[int, int], float]:
    """Step times of rows of one width, by rows and width."""
    return {
        (rows, widths[0]): cell["step_ms"]
        for (rows, widths, its_context), cell in figures.items()
        if len(widths) == 1 and its_context == context
    }


def _against_rows(axes: Axes, figures: Figures) -> None:
    times = _uniform(figures)
    rows = sorted({rows for rows, _ in times})
    for width in sorted({width for _, width in times}):
        axes.plot(rows, [times[r, width] for r in rows], "o-", label=f"width {width}")
    _label(axes, "Rows", f"rows in the step, context {USUAL_CONTEXT}", rows)


def _against_width(axes: Axes, figures: Figures) -> None:
    times = _uniform(figures)
    widths = sorted({width for _, width in times})
    for rows in WIDTH_ROWS:
        axes.plot(widths, [times[rows, w] for w in widths], "o-", label=f"{rows} rows")
    label = f"draft block size (1: plain decoding), context {USUAL_CONTEXT}"
    _label(axes, "Width", label, widths)


def _against_context(axes: Axes, figures: Figures) -> None:
    contexts = sorted({context for _, _, context in figures})
    for rows, width in CONTEXT_SHAPES:
        times = [figures[rows, (width,), context]["step_ms"] for context in contexts]
        line = "o--" if width == 1 else "o-"
        axes.plot(contexts, times, line, label=f"{rows} rows, width {width}")
    _label(axes, "Context", "tokens in front of each row", contexts)


def _against_positions(axes: Axes, figures: Figures) -> None:
    uniform: list[tuple[int, float]] = []
    mixed: list[tuple[int, float]] = []
    for (rows, widths, context), cell in figures.items():
        if context == USUAL_CONTEXT:
            positions = sum(widths[i % len(widths)] for i in range(rows))
            (uniform if len(widths) == 1 else mixed).append((positions, cell["verify_ms"]))
    for points, line, kind in ((uniform, "o", "one width"), (mixed, "o--", "mixed widths")):
        axes.plot(*zip(*sorted(points), strict=True), line, label=f"rows of {kind}")
    label = f"sum of the rows' widths, context {USUAL_CONTEXT}"
    powers = [2**power for power in range(10)]
    _label(axes, "Positions verified together", label, powers, "verify pass")


def _label(
    axes: Axes, title: str, x_label: str, x_ticks: Sequence[int], what: str = "step"
) -> None:
    axes.set(title=title, xlabel=x_label, ylabel=f"ms per {what}", xscale="log", yscale="log")
    axes.set_xticks(x_ticks, [str(tick) for tick in x_ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.step_cost_chart", description=__doc__)
    parser.add_argument("report", type=Path, help="the figures; the picture goes beside them")
    path = parser.parse_args().report
    picture = path.with_suffix(".svg")
    save_svg(draw(json.loads(path.read_text(encoding="utf-8"))), picture)
    print(f"wrote {picture}")


if __name__ == "__main__":
    main()
