"""Command line: ``python -m drafter.training train --target PATH --data FILE --out PATH``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from drafter.training.build import build_draft_model, find_mask_token_id
from drafter.training.capture import (
    CachedFeatureSource,
    FeatureSource,
    TargetTables,
    TransformersFeatureSource,
)
from drafter.training.config import TrainingConfig
from drafter.training.data import read_rows
from drafter.training.export import export_drafter
from drafter.training.trainer import Trainer

OPTIONAL_TYPES = {"gamma": float, "max_steps": int, "max_blocks_per_step": int}


def load_target(path: Path, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """Load a local target, frozen."""
    target: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="sdpa", device_map=device
    )
    target.eval().requires_grad_(False)
    return target


def feature_source(target: PreTrainedModel, layer_ids: list[int], cache_gb: float) -> FeatureSource:
    """Compute features online, kept in memory up to ``cache_gb``."""
    source = TransformersFeatureSource(target, layer_ids)
    return CachedFeatureSource(source, int(cache_gb * 2**30)) if cache_gb > 0 else source


def add_config_options(parser: argparse.ArgumentParser, defaults: TrainingConfig) -> None:
    """Give every field of ``TrainingConfig`` an option of its name."""
    for field in dataclasses.fields(TrainingConfig):
        default = getattr(defaults, field.name)
        option = "--" + field.name.replace("_", "-")
        if isinstance(default, bool):
            parser.add_argument(option, action=argparse.BooleanOptionalAction, default=default)
        else:
            kind = OPTIONAL_TYPES.get(field.name, type(default))
            parser.add_argument(option, type=kind, default=default)


def config_from(arguments: argparse.Namespace) -> TrainingConfig:
    """Collect the options added by ``add_config_options``."""
    names = [field.name for field in dataclasses.fields(TrainingConfig)]
    return TrainingConfig(**{name: getattr(arguments, name) for name in names})


def train(arguments: argparse.Namespace) -> None:
    """Train a drafter for a local target and export it."""
    config = config_from(arguments)
    target = load_target(arguments.target, getattr(torch, arguments.target_dtype), arguments.device)
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    model = build_draft_model(
        target,
        num_layers=arguments.num_layers,
        mask_token_id=find_mask_token_id(tokenizer, arguments.mask_token_id),
        draft_block_size=config.draft_block_size,
        seed=config.seed,
        num_taps=arguments.num_taps,
        target_layer_ids=arguments.target_layer_ids,
    ).to(arguments.device)
    source = feature_source(target, model.target_layer_ids, config.feature_cache_gb)
    held_out = []
    if arguments.held_out is not None:
        held_out = read_rows(arguments.held_out, config.max_length)
    trainer = Trainer(
        model,
        source,
        TargetTables.of(target),
        read_rows(arguments.data, config.max_length),
        held_out,
        config,
        arguments.work or arguments.out / "training",
        arguments.minutes,
    )
    trainer.run()
    result = trainer.held_out_figures or {"step": trainer.step}
    num_parameters = export_drafter(model, arguments.out)
    print(json.dumps({**result, "num_parameters": num_parameters, "out": str(arguments.out)}))


def main() -> None:
    """Parse the command line."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    parser = argparse.ArgumentParser(prog="python -m drafter.training", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("train", help="train a drafter and export it")
    command.add_argument("--target", type=Path, required=True, help="local checkpoint folder")
    command.add_argument("--data", type=Path, required=True, help="JSONL training rows")
    command.add_argument("--held-out", type=Path, help="JSONL rows for evaluation")
    command.add_argument("--out", type=Path, required=True, help="folder of the drafter")
    command.add_argument("--work", type=Path, help="checkpoints and log (OUT/training)")
    command.add_argument("--num-layers", type=int, default=5, help="draft layers")
    command.add_argument("--num-taps", type=int, help="tapped target layers in the default spread")
    command.add_argument("--target-layer-ids", type=int, nargs="+", help="tapped layers, 0-based")
    command.add_argument("--mask-token-id", type=int, help="default: the tokenizer's mask token")
    command.add_argument("--target-dtype", choices=["float32", "bfloat16"], default="bfloat16")
    command.add_argument("--device", default="cpu")
    command.add_argument("--minutes", type=float, help="fix the number of steps by measuring one")
    add_config_options(command, TrainingConfig())
    train(parser.parse_args())


if __name__ == "__main__":
    main()
