"""The block scheduler against fixed widths, traffic by traffic and load by load: ``make bench-scheduler``.

One warm server, temperature 0. In each cell all policies run in one order and then in the opposite one, so
that a drift of the machine hits all alike; a repeat is one such pair. Prints the regret matrix with bootstrap
intervals and ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from loadtest import prompt_sets
from loadtest.bench_rows import ApiClient
from loadtest.cell_options import add_cell_arguments, check_cell_options, default_prompts
from loadtest.closed_loop import ClosedLoop
from loadtest.interleaved import measure_interleaved
from loadtest.load_step import StepRun, render_steps, run_load_step
from loadtest.metrics_reader import MetricsReader
from loadtest.processes import (
    BenchError,
    accept_interrupts,
    add_server_arguments,
    start_server,
)
from loadtest.scheduler_charts import draw_load_step, draw_matrix
from loadtest.scheduler_report import JUDGED, evaluate, render, to_json


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_scheduler", description=__doc__)
    add_server_arguments(parser)
    add_cell_arguments(
        parser,
        levels="1,2,4,8,16,32",
        policies=f"off,static:4,static:6,static:8,static:16,{JUDGED}",
        seconds=3.0,
        warm_up=1.5,
    )
    parser.add_argument("--repeats", type=int, default=2, help="pairs of opposite orders")
    parser.add_argument(
        "--step-policies", default=f"off,static:4,static:16,{JUDGED}", help="for the load step"
    )
    parser.add_argument(
        "--step-seconds", type=float, default=8.0, help="length of its phases; 0: none"
    )
    parser.add_argument("--pictures", type=Path, help="folder for pictures; default: none")
    options = parser.parse_args(arguments)
    check_cell_options(parser, options, "repeats")
    if JUDGED not in options.policies:
        parser.error(f"--policies needs {JUDGED!r}: it is what is judged")
    return options


async def measure_steps(
    url: str, model: str, traffics: Sequence[str], options: argparse.Namespace
) -> list[StepRun]:
    """Run each of the chosen policies through a load step from the lowest to the highest level."""
    prompts = prompt_sets.interleave([prompt_sets.load(name) for name in traffics])
    half = len(prompts) // 2
    lasting = ClosedLoop(url, model, prompts, options.max_tokens)
    passing = ClosedLoop(url, model, prompts[half:] + prompts[:half], options.max_tokens)
    streams = (min(options.levels), max(options.levels))
    return [
        await run_load_step(
            lasting, passing, MetricsReader(url), policy, streams, options.step_seconds
        )
        for policy in options.step_policies.split(",")
    ]


def run(options: argparse.Namespace) -> None:
    """Run the comparison and print it.

    Raises:
        BenchError: the server or a request failed.
        ValueError: a prompt set is unknown.
    """
    names = (options.prompts or f"{default_prompts()},chat").split(",")
    with ExitStack() as stack:
        url = start_server(stack, options)
        model = ApiClient(url).model_id()
        loops = {
            name: ClosedLoop(url, model, prompt_sets.load(name), options.max_tokens)
            for name in names
        }
        cells = asyncio.run(
            measure_interleaved(
                loops,
                options.levels,
                dict.fromkeys(options.policies, options.warm_up),
                2 * options.repeats,
                options.seconds,
            )
        )
        matrix = evaluate(cells)
        steps = (
            asyncio.run(measure_steps(url, model, names, options)) if options.step_seconds else []
        )
    settings: dict[str, object] = {
        "model": model,
        "repeats": 2 * options.repeats,
        "seconds": options.seconds,
        "max_tokens": options.max_tokens,
    }
    print(render(matrix))
    if steps:
        print(f"\n{render_steps(steps)}")
    if options.pictures:
        draw_matrix(matrix, options.pictures / "block-scheduler-matrix.svg")
        if steps:
            draw_load_step(steps, options.pictures / "block-scheduler-step.svg")
    print(to_json(matrix, settings))


def main() -> None:
    """Command line entry."""
    accept_interrupts()
    try:
        run(parse_arguments())
    except (BenchError, ValueError) as error:
        sys.exit(f"bench-scheduler: {error}")


if __name__ == "__main__":
    main()
