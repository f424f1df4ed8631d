"""Throughput and latency from one stream to many: ``make bench-serving``.

A closed loop at every level, all block policies in rotating order, temperature 0. Prints one table and
ends with one line of JSON. Throughput is the median over repeats; latencies are over all answers.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from tqdm import tqdm

from loadtest.bench_report import rotated
from loadtest.bench_rows import ApiClient
from loadtest.cell_options import add_cell_arguments, check_cell_options, chosen_prompts
from loadtest.closed_loop import Cell, ClosedLoop
from loadtest.interleaved import PROMPTS_APART
from loadtest.processes import (
    BenchError,
    accept_interrupts,
    add_server_arguments,
    start_server,
)
from loadtest.serving_report import evaluate, render_table, to_json


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_serving", description=__doc__)
    add_server_arguments(parser)
    add_cell_arguments(
        parser,
        levels="1,2,4,8,16,32,64",
        policies="off,static:4,static:8,static:16",
        seconds=4.0,
        warm_up=1.0,
    )
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    check_cell_options(parser, options, "repeats")
    return options


async def measure_all(
    loop: ClosedLoop,
    levels: Sequence[int],
    policies: Sequence[str],
    repeats: int,
    warm_s: float,
    measure_s: float,
) -> list[Cell]:
    """Run every policy at every level ``repeats`` times, interleaved."""
    cells = []
    with tqdm(total=len(levels) * len(policies) * repeats, unit="cell") as progress:
        for repeat in range(repeats):
            for level in levels:
                for policy in rotated(list(policies), repeat):
                    progress.set_postfix_str(f"{level} streams, {policy}")
                    first_prompt = repeat * PROMPTS_APART
                    cell = await loop.run(policy, level, warm_s, measure_s, first_prompt)
                    cells.append(cell)
                    progress.update()
    return cells


def run(options: argparse.Namespace) -> None:
    """Run the comparison and print it.

    Raises:
        BenchError: the server or a request failed.
        ValueError: a prompt set is unknown.
    """
    names, prompts = chosen_prompts(options)
    with ExitStack() as stack:
        url = start_server(stack, options)
        model = ApiClient(url).model_id()
        loop = ClosedLoop(url, model, prompts, options.max_tokens)
        cells = asyncio.run(
            measure_all(
                loop,
                options.levels,
                options.policies,
                options.repeats,
                options.warm_up,
                options.seconds,
            )
        )
    report = evaluate(cells)
    settings: dict[str, object] = {
        "model": model,
        "prompts": names,
        "repeats": options.repeats,
        "seconds": options.seconds,
        "max_tokens": options.max_tokens,
    }
    print(render_table(report))
    print(to_json(report, settings))


def main() -> None:
    """Command line entry."""
    accept_interrupts()
    try:
        run(parse_arguments())
    except (BenchError, ValueError) as error:
        sys.exit(f"bench-serving: {error}")


if __name__ == "__main__":
    main()
