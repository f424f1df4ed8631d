"""What an offline batch is given: a command line, and JSON lines that become items.

What a row asks is checked when it is answered, so that a wrong one costs its own answer and not the batch.
Only a row that no output line could name is an error of the file.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_wire.errors import ConfigError
from gateway.choice_seeds import SEED_RANGE
from services.offline_answers import has_surrogate
from services.offline_output import check_writable

MAX_CONCURRENCY = 1024
"""A thread each; also what the engine lets wait by default."""
MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One input row."""

    id: str
    row: dict[str, Any]
    """Its fields; see ``services.offline_answers.row_body``."""


def read_items(path: Path) -> list[BatchItem]:
    """Read the input file.

    Raises:
        ConfigError: the file cannot be read, a line is not a JSON object, or an id is unusable or
            occurs twice.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    items: list[BatchItem] = []
    first_lines: dict[str, int] = {}
    # Only "\n" ends a line of JSONL: a JSON string may hold U+2028 and its like as they are.
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        row = _parse_row(line, where)
        item_id = _row_id(row, number, where)
        if item_id in first_lines:
            raise ConfigError(
                f"{where} repeats the id {item_id!r} of line {first_lines[item_id]}; "
                "give every row its own id"
            )
        first_lines[item_id] = number
        items.append(BatchItem(item_id, row))
    return items


def _parse_row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8; convert the file: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is not a JSON object; write one object a line")
    return row


def _row_id(row: dict[str, Any], number: int, where: str) -> str:
    value = row.get("id", f"line-{number}")
    # bool is an int to Python, but true names nothing.
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ConfigError(f"{where} has an id that is neither a string nor an integer; change it")
    item_id = str(value)
    if has_surrogate(item_id):
        raise ConfigError(f"{where} has half a surrogate pair in its id {item_id!r}; change it")
    return item_id


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read and check the command line; a wrong one ends the program with status 2."""
    parser = argparse.ArgumentParser(
        prog="python -m services.offline",
        description="Answer a JSONL file of prompts without HTTP; run again to go on where it stopped.",
    )
    parser.add_argument("--prompts", type=Path, required=True, help="input JSONL")
    parser.add_argument("--output", type=Path, help="output JSONL (default: PROMPTS.out.jsonl)")
    parser.add_argument("--config", type=Path, default=Path("config.yaml"))
    parser.add_argument(
        "--policy",
        help="adaptive, table, off, static:<w> or static-tree:<n>; default from the config",
    )
    parser.add_argument("--max-tokens", type=_integer(1, MAX_COUNT), default=256)
    parser.add_argument("--temperature", type=_temperature, default=0.0, help="0 is greedy")
    parser.add_argument("--top-p", type=_top_p, default=1.0)
    parser.add_argument("--top-k", type=_integer(-1, MAX_COUNT), default=0, help="0 or -1: all")
    parser.add_argument("--seed", type=_integer(0, SEED_RANGE - 1), default=0)
    parser.add_argument(
        "--concurrency", type=_integer(1, MAX_CONCURRENCY), default=8, help="prompts in flight"
    )
    options = parser.parse_args(arguments)
    _check_paths(parser, options)
    return options


def _integer(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"must be an integer from {least} to {most}, not {text[:40]!r}"
            )
        return value

    return parse


def _temperature(text: str) -> float:
    value = _float(text)
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 2, not {text[:40]!r}")
    return value


def _top_p(text: str) -> float:
    value = _float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(
            f"must be a number above 0 and at most 1, not {text[:40]!r}"
        )
    return value


def _float(text: str) -> float:
    """Return ``text`` as a number; one that no range holds when it is none."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _check_paths(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Set the default output and refuse paths that cannot work."""
    if not os.path.exists(options.prompts):
        parser.error(f"argument --prompts: {options.prompts} does not exist; name a JSONL file")
    if os.path.isdir(options.prompts):
        parser.error(f"argument --prompts: {options.prompts} is a folder; name a JSONL file")
    if options.output is None:
        options.output = options.prompts.with_suffix(".out.jsonl")
    output: Path = options.output
    if os.path.exists(output) and not os.path.isfile(output):
        parser.error(f"argument --output: {output} is not a regular file; name another")
    if os.path.exists(output) and os.path.samefile(output, options.prompts):
        parser.error(f"argument --output: {output} is the prompts file; name another")
    try:
        check_writable(output)
    except OSError as error:
        parser.error(f"argument --output: cannot write {output}: {error.strerror}; name another")
