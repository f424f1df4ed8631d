"""``python -m drafter.checkpoint``: look at a drafter checkpoint, convert it, trim its vocabulary.

inspect PATH [--target DIR]                  what it is, and whether it fits a target
convert PATH OUT --layout z-lab|speculators  the same drafter in that layout; tensors do not change
trim PATH OUT --target DIR --size N --corpus FILE...   the same drafter, drafting only frequent tokens
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from dflash_wire.errors import ConfigError
from drafter.checkpoint.eagle3 import is_eagle3, layout_of, load_eagle3_model
from drafter.checkpoint.files import CONFIG, Z_LAB, read_checkpoint, read_json
from drafter.checkpoint.frequencies import count_tokens
from drafter.checkpoint.inspection import describe, describe_eagle3
from drafter.checkpoint.load import build_model
from drafter.checkpoint.pairing import check_values, pair_values
from drafter.checkpoint.save import ANY_ATTENTION, LAYOUTS, write_checkpoint
from drafter.checkpoint.target import complete_with, target_values
from drafter.checkpoint.trim import ending_tokens, frequent_tokens, trimmed
from drafter.eagle3.model import Eagle3Model
from drafter.model import DraftModel


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command == "inspect":
            _inspect(arguments.path, arguments.target)
        elif arguments.command == "trim":
            _trim(arguments)
        else:
            _convert(arguments.path, arguments.out, arguments.layout, arguments.target)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _inspect(path: Path, target: Path | None) -> None:
    values = read_json(path / CONFIG, f"no draft checkpoint at {path}: {CONFIG} is missing")
    model: DraftModel | Eagle3Model
    if is_eagle3(values):
        depth = None if target is None else target_values(target)["num_target_layers"]
        model = load_eagle3_model(path, torch.float32, depth, draft_block_size=2)
        rows = describe_eagle3(layout_of(values), model)
    else:
        checkpoint = read_checkpoint(path)
        model = build_model(checkpoint, ANY_ATTENTION, str(path))
        rows = describe(checkpoint, model)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    if target is not None:
        check_values(pair_values(model), target_values(target), model.target_layer_ids)
        print(f"{'fits':<{width}}  {target}")


def _convert(path: Path, out: Path, layout: str, target: Path | None) -> None:
    checkpoint = read_checkpoint(path)
    if target is not None:
        model = build_model(checkpoint, ANY_ATTENTION, str(path))
        check_values(pair_values(model), target_values(target), model.target_layer_ids)
        complete_with(checkpoint, target, layout)
    write_checkpoint(checkpoint, out, layout)
    print(f"{out}: {layout} layout, {sum(t.numel() for t in checkpoint.tensors.values())} numbers")


def _trim(arguments: argparse.Namespace) -> None:
    path, target, size = arguments.path, arguments.target, arguments.size
    checkpoint = read_checkpoint(path)
    model = build_model(checkpoint, ANY_ATTENTION, str(path))
    check_values(pair_values(model), target_values(target), model.target_layer_ids)
    counts = count_tokens(arguments.corpus, target, model.config.vocab_size)
    token_ids = frequent_tokens(counts, size, ending_tokens(target), {model.mask_token_id})
    smaller = trimmed(checkpoint, token_ids)
    complete_with(smaller, target, arguments.layout)
    write_checkpoint(smaller, arguments.out, arguments.layout)
    covered = float(counts[token_ids].sum() / counts.sum())
    print(f"{arguments.out}: {size} of {counts.shape[0]} tokens, {covered:.2%} of the corpus")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m drafter.checkpoint", description="Drafter checkpoints."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="what a checkpoint is")
    convert = commands.add_parser("convert", help="write a checkpoint in another layout")
    trim = commands.add_parser("trim", help="draft only the frequent tokens of a corpus")
    for command in (inspect, convert, trim):
        command.add_argument("path", type=Path, help="folder with config.json and safetensors")
        command.add_argument(
            "--target", type=Path, required=command is trim, help="folder of the target model"
        )
    for command in (convert, trim):
        command.add_argument("out", type=Path, help="folder to write")
    convert.add_argument("--layout", choices=LAYOUTS, required=True)
    trim.add_argument("--layout", choices=LAYOUTS, default=Z_LAB)
    trim.add_argument("--size", type=int, required=True, help="tokens of the draft vocabulary")
    trim.add_argument(
        "--corpus", type=Path, nargs="+", required=True, help="JSONL (text or token ids) or text"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
