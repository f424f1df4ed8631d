"""Asks the card what it has, and the models' files what they hold, before anything is loaded."""

from __future__ import annotations

import logging
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from dflash_ops.tensor_files import WEIGHTS, indexed_files
from dflash_wire.errors import ConfigError
from drafter.borrowed import EMBEDDING, HEAD
from services.drafter_kinds import DrafterKind, flat_config
from services.memory_plan import (
    GIB,
    ITEM_BYTES,
    MemoryPlan,
    Sizes,
    plan_drafter,
    plan_verifier,
    together,
)
from services.model_files import read_json
from services.placement import SAME_GPU
from services.spec import EngineSpec
from verifier.shard_rules import SPLIT_COUNTS

logger = logging.getLogger(__name__)

USUAL_WIDTH = 16
"""Of a row when all rows are wide."""
USUAL_TAPS = 5
"""Layers that a drafter taps; the FeaturePool is small, so no config is asked."""


def check_memory(spec: EngineSpec, drafter: int | None = None) -> None:
    """Refuse an executor that will not fit its card; on a CPU there is nothing to check.

    Args:
        spec: of the engine. Where executors share a card, all of them have to fit it.
        drafter: index of the drafter that starts; None: the verifier, or a rank of it.

    Raises:
        ConfigError: with all sizes.
    """
    if spec.device == "cpu":
        return
    free, total = torch.cuda.mem_get_info()
    if spec.placement == SAME_GPU:  # others may have begun to load, so what is free says nothing
        plans = [verifier_plan(spec), *(drafter_plan(spec, i) for i in range(len(spec.drafters)))]
        have, source = total, "on the card"
    else:
        plans = [verifier_plan(spec) if drafter is None else drafter_plan(spec, drafter)]
        have, source = free, f"free of the card's {total / GIB:.2f} GiB"
    needed = [plan for plan in plans if plan is not None]
    if not needed:
        return
    plan = together(needed)
    plan.check(have, source)
    logger.info("memory: %s of %.2f GiB", plan, have / GIB)


def tensor_sizes(folder: Path) -> dict[str, int]:
    """Elements of every tensor in a folder's safetensors files; reads their headers only.

    Of a folder with an index, or with the file that needs none, no others are read: hubs keep the same
    weights under other names beside them.

    Raises:
        ConfigError: a file is broken, cut off, or named by the index and missing.
    """
    found: dict[str, int] = {}
    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="pt") as tensors:
                for name in tensors.offset_keys():
                    found[name] = prod(tensors.get_slice(name).get_shape())
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} is not a safetensors file: {error}") from error
    return found


def _weight_files(folder: Path) -> list[Path]:
    if (indexed := indexed_files(folder)) is not None:
        return sorted(set(indexed.values()))
    single = folder / WEIGHTS
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))


def verifier_plan(spec: EngineSpec) -> MemoryPlan:
    """What a verifier of ``spec`` needs, or rank 0 of several, which holds most."""
    folder = Path(spec.target_path)
    config = read_json(folder / "config.json", is_required=True)
    elements = tensor_sizes(folder)
    whole = sum(elements.get(name, 0) for name in (EMBEDDING, HEAD))
    split = (sum(elements.values()) - whole) // spec.num_ranks
    if spec.num_ranks > 1:
        config |= {name: config[name] // spec.num_ranks for name in SPLIT_COUNTS if name in config}
    taps = 1 if spec.projects_features else USUAL_TAPS * max(1, len(spec.drafters))
    weight_bytes = (whole + split) * ITEM_BYTES[spec.dtype]
    return plan_verifier(config, weight_bytes, taps * int(config["hidden_size"]), _sizes(spec))


def drafter_plan(spec: EngineSpec, index: int) -> MemoryPlan | None:
    """What one of the drafters of ``spec`` needs; None when it has no model."""
    if spec.drafters[index].kind is DrafterKind.NGRAM:
        return None
    target_folder, folder = Path(spec.target_path), Path(spec.drafters[index].path)
    target = read_json(target_folder / "config.json", is_required=True)
    values = flat_config(read_json(folder / "config.json", is_required=True))
    borrowed = tensor_sizes(target_folder)
    item = ITEM_BYTES[spec.dtype]
    return plan_drafter(
        values,
        int(target["vocab_size"]),
        sum(tensor_sizes(folder).values()) * item,
        sum(borrowed.get(name, 0) for name in (EMBEDDING, HEAD)) * item,
        spec.num_lanes,
        _sizes(spec),
    )


def _sizes(spec: EngineSpec) -> Sizes:
    positions = spec.max_step_positions
    most_logits = min(positions, USUAL_WIDTH * spec.max_rows)
    pages = spec.num_pages, spec.page_size
    return Sizes(spec.dtype, *pages, positions, most_logits, spec.graph_bytes)
