"""Command-line options of benches that run cells of a closed loop."""

from __future__ import annotations

import argparse

from loadtest import prompt_sets
from loadtest.bench_report import PLAIN
from loadtest.prompt_sets import Prompt


def add_cell_arguments(
    parser: argparse.ArgumentParser, *, levels: str, policies: str, seconds: float, warm_up: float
) -> None:
    """Add the options that ``check_cell_options`` checks; the arguments are their defaults."""
    parser.add_argument("--levels", default=levels, help="numbers of streams")
    parser.add_argument("--policies", default=policies, help="of our server")
    parser.add_argument(
        "--prompts", help="prompt sets, with commas; default: public ones if here, else our own"
    )
    parser.add_argument("--seconds", type=float, default=seconds, help="length of a window")
    parser.add_argument("--warm-up", type=float, default=warm_up, help="seconds before a window")
    parser.add_argument("--max-tokens", type=int, default=128)


def check_cell_options(
    parser: argparse.ArgumentParser, options: argparse.Namespace, *counts: str
) -> None:
    """Split lists and refuse what cannot be measured. Mutates ``options``; ends the program on errors.

    Args:
        parser: reports the error.
        options: as parsed.
        counts: names of further options that are at least 1.
    """
    try:
        options.levels = [int(level) for level in options.levels.split(",")]
    except ValueError:
        parser.error("--levels are whole numbers with commas between them")
    counts = ("max_tokens", *counts)
    if min(*options.levels, *(getattr(options, name) for name in counts)) < 1:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in counts)
        parser.error(f"--levels, {names} are at least 1")
    if options.seconds <= 0 or options.warm_up < 0:
        parser.error("--seconds is positive, --warm-up not negative")
    options.policies = options.policies.split(",")
    if PLAIN not in options.policies:
        parser.error(f"--policies needs {PLAIN!r}: the others are compared with it")


def chosen_prompts(options: argparse.Namespace) -> tuple[str, list[Prompt]]:
    """Return the names of the chosen prompt sets and one prompt of each in turn.

    Raises:
        ValueError: a prompt set is unknown.
    """
    names = options.prompts or default_prompts()
    return names, prompt_sets.interleave([prompt_sets.load(name) for name in names.split(",")])


def default_prompts() -> str:
    """GSM8K and HumanEval when they are here, else our own word problems and code stubs."""
    has_public = set(prompt_sets.PUBLIC_SETS) <= set(prompt_sets.available_sets())
    return "gsm8k,humaneval" if has_public else "word_problems,code_stubs"
