"""Judge block schedulers in simulation: ``python -m loadtest.simulator``.

Runs every policy in every cell of traffic, machine and streams, then through changes of traffic, load and
drafter, then with the paper's calibration. Prints tables, the bars of the policy that is judged, and one
line of JSON; exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from loadtest.simulator.bars import Bar, cell_bars, change_bar
from loadtest.simulator.changes import Recovery, run_changes
from loadtest.simulator.costs import COSTS
from loadtest.simulator.matrix import (
    FIXED,
    POLICIES,
    STREAMS,
    CellResult,
    Effort,
    cells,
    run_cells,
)
from loadtest.simulator.paper import PaperRow, run_paper
from loadtest.simulator.report import (
    render_bars,
    render_cells,
    render_means,
    render_paper,
    render_recoveries,
    to_json,
)
from loadtest.simulator.worlds import TRAFFICS

SECTIONS = ("matrix", "changes", "paper")
CHOICES = {
    "costs": tuple(COSTS),
    "traffics": tuple(TRAFFICS),
    "policies": tuple(POLICIES),
    "sections": SECTIONS,
}
RULES = tuple(name for name in POLICIES if name not in FIXED)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.simulator", description=__doc__)
    for name, known in CHOICES.items():
        default = RULES if name == "policies" else known
        parser.add_argument(f"--{name}", default=",".join(default), help="with commas")
    parser.add_argument("--streams", default=",".join(map(str, STREAMS)), help="with commas")
    parser.add_argument("--judged", default="adaptive", help="the policy that the bars are for")
    parser.add_argument(
        "--tokens", type=int, default=2000, help="per stream; its steps with plain decoding"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the matrix")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tagged", action="store_true", help="rows tell their kind of traffic")
    options = parser.parse_args(arguments)
    for name, known in CHOICES.items():
        chosen = [part for part in getattr(options, name).split(",") if part]
        if unknown := set(chosen) - set(known):
            parser.error(f"--{name} does not know {', '.join(sorted(unknown))}")
        setattr(options, name, chosen)
    try:
        options.streams = [int(part) for part in options.streams.split(",")]
    except ValueError:
        parser.error("--streams needs whole numbers with commas")
    if min(*options.streams, options.jobs) < 1 or options.tokens < 8:
        parser.error("--streams and --jobs must be at least 1 and --tokens at least 8")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, and return the exit status."""
    options = parse_arguments(arguments)
    effort = Effort(options.tokens, options.seed, options.tagged)
    results = _matrix(options, effort) if "matrix" in options.sections else []
    recoveries = _changes(options) if "changes" in options.sections else []
    paper = _paper(options, effort) if "paper" in options.sections else []
    bars = _bars(options, results, recoveries)
    if bars:
        print(render_bars(options.judged, bars))
    print(to_json(results, recoveries, paper, bars))
    return 0 if all(bar.is_met for bar in bars) else 1


def _matrix(options: argparse.Namespace, effort: Effort) -> list[CellResult]:
    costs = [COSTS[name] for name in options.costs]
    traffics = [TRAFFICS[name] for name in options.traffics]
    chosen = list(cells(costs, traffics, options.streams))
    results = run_cells(chosen, options.policies, effort, options.jobs)
    print(render_cells(results), render_means(results), sep="\n\n", end="\n\n", flush=True)
    return results


def _changes(options: argparse.Namespace) -> list[Recovery]:
    recoveries = [
        recovery
        for policy in options.policies
        for cost in options.costs
        for recovery in run_changes(policy, COSTS[cost], options.seed)
    ]
    if recoveries:
        print(render_recoveries(recoveries), end="\n\n", flush=True)
    return recoveries


def _paper(options: argparse.Namespace, effort: Effort) -> list[PaperRow]:
    rows = run_paper(options.policies, [n for n in options.streams if n <= 128], effort)
    if rows:
        print(render_paper(rows), end="\n\n", flush=True)
    return rows


def _bars(
    options: argparse.Namespace, results: list[CellResult], recoveries: list[Recovery]
) -> list[Bar]:
    if options.judged not in options.policies:
        return []
    bars = cell_bars(options.judged, results) if results else []
    return [*bars, *([change_bar(options.judged, recoveries)] if recoveries else [])]


if __name__ == "__main__":
    sys.exit(main())
