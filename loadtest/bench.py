"""Speed of every block policy, and of other drafters, beside two reference loops: ``make bench``.

One stream, temperature 0. All rows answer a prompt before the next prompt comes, in rotating order, so
a busy machine slows all of them alike. Prints one table and ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from tqdm import tqdm

from loadtest import prompt_sets
from loadtest.bench_drafters import OWN_ROWS, has_dflash, with_ngram
from loadtest.bench_report import (
    PLAIN,
    REFERENCE_ROWS,
    Measurement,
    evaluate,
    render_table,
    rotated,
    to_json,
)
from loadtest.bench_rows import ApiClient, BenchPrompt, ReferenceRow, Row, ServedRow
from loadtest.processes import (
    BenchError,
    Worker,
    accept_interrupts,
    add_server_arguments,
    start_server,
)

WORKER_MODULE = "services.bench_reference"
WARM_UP_TOKENS = 16


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench", description=__doc__)
    add_server_arguments(parser)
    parser.add_argument("--prompts", default="word_problems", help="prompt sets, with commas")
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--policies", default="off,static:4,static:8,static:16")
    parser.add_argument(
        "--drafters",
        help="rows of other drafters: name=policy, with commas. A server started here has 'ngram', and gets "
        f"the row {OWN_ROWS} unless others are named",
    )
    parser.add_argument(
        "--no-references", action="store_true", help="leave out the loops without a server"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit 1 when a bar is missed or an output differs"
    )
    options = parser.parse_args(arguments)
    if PLAIN not in options.policies.split(","):
        parser.error(f"--policies needs {PLAIN!r}: the other rows are compared with it")
    if min(options.num_prompts, options.repeats, options.max_tokens) < 1:
        parser.error("--num-prompts, --repeats and --max-tokens are at least 1")
    if options.drafters is None:
        options.drafters = "" if options.base_url else OWN_ROWS
    if any("=" not in row for row in options.drafters.split(",") if row):
        parser.error("--drafters wants name=policy, with commas")
    return options


def measure_all(
    rows: Sequence[Row], prompts: Sequence[BenchPrompt], repeats: int, max_tokens: int
) -> list[Measurement]:
    """Let every row answer every prompt ``repeats`` times, interleaved, after one warm-up each."""
    by_name = {row.name: row for row in rows}
    for row in rows:
        row.measure(prompts[0], WARM_UP_TOKENS, repeat=-1)
    measurements = []
    with tqdm(total=repeats * len(prompts) * len(rows), unit="answer") as progress:
        for repeat in range(repeats):
            for index, prompt in enumerate(prompts):
                for name in rotated(list(by_name), repeat + index):
                    progress.set_postfix_str(name)
                    measurements.append(by_name[name].measure(prompt, max_tokens, repeat))
                    progress.update()
    return measurements


def start_references(stack: ExitStack, options: argparse.Namespace) -> list[ReferenceRow]:
    """Start the reference workers, unless the options leave them out."""
    if options.no_references:
        return []
    modes = dict(REFERENCE_ROWS)
    if not has_dflash(options.config):
        print(
            f"No row {modes.pop('dflash')!r}: the drafter is no DFlash checkpoint", file=sys.stderr
        )
    workers = {
        name: stack.enter_context(Worker(WORKER_MODULE, mode, "--config", str(options.config)))
        for mode, name in modes.items()
    }
    for worker in workers.values():
        worker.wait_ready()
    return [ReferenceRow(worker, name) for name, worker in workers.items()]


def run(options: argparse.Namespace) -> int:
    """Run the comparison and print it.

    Returns:
        The exit status.

    Raises:
        BenchError: a process or a request failed.
        ValueError: a prompt set is unknown.
    """
    chosen = prompt_sets.load(options.prompts, limit=options.num_prompts)
    with ExitStack() as stack:
        if options.drafters and not options.base_url:
            options.config = stack.enter_context(with_ngram(options.config))
        client = ApiClient(start_server(stack, options))
        references = start_references(stack, options)
        model = client.model_id()
        served = [ServedRow(client, model, policy) for policy in options.policies.split(",")]
        for name, _, policy in (row.partition("=") for row in options.drafters.split(",") if row):
            served.append(ServedRow(client, model, policy, name))
        prompts = [
            BenchPrompt(p, references[0].token_ids(p) if references else None) for p in chosen
        ]
        rows: list[Row] = [*served, *references]
        measurements = measure_all(rows, prompts, options.repeats, options.max_tokens)
    report = evaluate([row.name for row in rows], measurements)
    settings: dict[str, object] = {
        "model": model,
        "prompts": options.prompts,
        "num_prompts": len(prompts),
        "repeats": options.repeats,
        "max_tokens": options.max_tokens,
    }
    print(render_table(report))
    print(to_json(report, settings))
    return 1 if options.check and report.has_failed else 0


def main() -> None:
    """Command line entry."""
    accept_interrupts()
    try:
        sys.exit(run(parse_arguments()))
    except (BenchError, ValueError) as error:
        sys.exit(f"bench: {error}")


if __name__ == "__main__":
    main()
