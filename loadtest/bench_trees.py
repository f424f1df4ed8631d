"""Trees of drafts against chains of as many verified positions: ``make bench-trees``.

One warm server; every policy at every temperature and number of streams, in one order and then in the
opposite one. A request's number is its seed, so all policies answer the same; ``= off`` says whether they
did. A chain ends at the draft block (16), so larger trees are compared with the widest chain. ``tau`` is
counted in every window. With the defaults 360 windows take about 25 minutes on two cores; choose fewer
policies, levels or temperatures for less. Prints one table, the bars, and ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from loadtest.bench_rows import ApiClient
from loadtest.cell_options import add_cell_arguments, check_cell_options, chosen_prompts
from loadtest.closed_loop import ClosedLoop
from loadtest.interleaved import measure_interleaved
from loadtest.metrics_reader import MetricsReader
from loadtest.processes import (
    BenchError,
    accept_interrupts,
    add_server_arguments,
    start_server,
)
from loadtest.scheduler_report import JUDGED
from loadtest.tree_report import evaluate, positions, render_table, to_json

POLICIES = (
    "off,static:4,static:8,static:16,"
    "static-tree:4,static-tree:8,static-tree:16,static-tree:32,static-tree:64,"
    f"{JUDGED}"
)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_trees", description=__doc__)
    add_server_arguments(parser)
    add_cell_arguments(parser, levels="1,4,8,16", policies=POLICIES, seconds=2.0, warm_up=0.7)
    parser.add_argument(
        "--adaptive-warm-up",
        type=float,
        default=2.5,
        help="the same for policies that learn from what they serve",
    )
    parser.add_argument("--temperatures", default="0,0.7,1.0")
    parser.add_argument("--top-p", type=float, help="default: the model's generation_config.json")
    parser.add_argument("--top-k", type=int, help="0: all tokens; default: as for --top-p")
    parser.add_argument(
        "--repeats", type=int, default=3, help="windows; every second one in the opposite order"
    )
    options = parser.parse_args(arguments)
    check_cell_options(parser, options, "repeats")
    try:
        options.temperatures = [float(value) for value in options.temperatures.split(",")]
    except ValueError:
        parser.error("--temperatures are numbers with commas between them")
    if min(options.temperatures) < 0 or options.adaptive_warm_up < 0:
        parser.error("--temperatures, --adaptive-warm-up are not negative")
    return options


def sampling_fields(options: argparse.Namespace, temperature: float) -> dict[str, float]:
    """Return the fields of a request; those that the options leave out are left to the server."""
    fields = {"temperature": temperature, "top_p": options.top_p, "top_k": options.top_k}
    return {name: value for name, value in fields.items() if value is not None}


def run(options: argparse.Namespace) -> None:
    """Run the comparison and print it.

    Raises:
        BenchError: the server or a request failed.
        ValueError: a prompt set is unknown.
    """
    names, prompts = chosen_prompts(options)
    warm_up_s = {
        policy: options.adaptive_warm_up if positions(policy) is None else options.warm_up
        for policy in options.policies
    }
    with ExitStack() as stack:
        url = start_server(stack, options)
        model = ApiClient(url).model_id()
        loops = {
            temperature: ClosedLoop(
                *(url, model, prompts, options.max_tokens),
                sampling=sampling_fields(options, temperature),
            )
            for temperature in options.temperatures
        }
        cells = asyncio.run(
            measure_interleaved(
                *(loops, options.levels, warm_up_s, options.repeats, options.seconds),
                reader=MetricsReader(url),
            )
        )
    report = evaluate(cells)
    settings: dict[str, object] = {
        "model": model,
        "prompts": names,
        "repeats": options.repeats,
        "seconds": options.seconds,
        "max_tokens": options.max_tokens,
        "top_p": options.top_p,
        "top_k": options.top_k,
    }
    print(render_table(report))
    print(to_json(report, settings))


def main() -> None:
    """Command line entry."""
    accept_interrupts()
    try:
        run(parse_arguments())
    except (BenchError, ValueError) as error:
        sys.exit(f"bench-trees: {error}")


if __name__ == "__main__":
    main()
