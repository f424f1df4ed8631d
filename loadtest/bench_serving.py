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

from loadtest import prompt_sets
from loadtest.bench_report import PLAIN, rotated
from loadtest.bench_rows import ApiClient
from loadtest.closed_loop import Cell, ClosedLoop
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
    parser.add_argument("--levels", default="1,2,4,8,16,32,64", help="numbers of streams")
    parser.add_argument("--policies", default="off,static:4,static:8,static:16")
    parser.add_argument(
        "--prompts", help="prompt sets, with commas; default: public ones if here, else our own"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a window")
    parser.add_argument("--warm-up", type=float, default=1.0, help="seconds before a window")
    parser.add_argument("--max-tokens", type=int, default=128)
    options = parser.parse_args(arguments)
    try:
        options.levels = [int(level) for level in options.levels.split(",")]
    except ValueError:
        parser.error("--levels are whole numbers with commas between them")
    options.policies = options.policies.split(",")
    if min(options.levels) < 1 or min(options.repeats, options.max_tokens) < 1:
        parser.error("--levels, --repeats and --max-tokens are at least 1")
    if options.seconds <= 0 or options.warm_up < 0:
        parser.error("--seconds is positive, --warm-up not negative")
    if PLAIN not in options.policies:
        parser.error(f"--policies needs {PLAIN!r}: the others are compared with it")
    return options


def default_prompts() -> str:
    """GSM8K and HumanEval when they are here, else our own word problems and code stubs."""
    has_public = set(prompt_sets.PUBLIC_SETS) <= set(prompt_sets.available_sets())
    return "gsm8k,humaneval" if has_public else "word_problems,code_stubs"


PROMPTS_APART = 37
"""How far the repeats' first prompts lie apart; cells of one repeat all get the same prompts."""


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
    names = options.prompts or default_prompts()
    sets = [prompt_sets.load(name) for name in names.split(",")]
    prompts = prompt_sets.interleave(sets)
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
