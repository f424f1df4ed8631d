"""What steps cost on this machine: an earlier start's measurement, or a new one."""

from __future__ import annotations

import json
import logging
import platform
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from dflash_ops.kernel_build import ROW_ATTENTION, kept_library
from dflash_wire.ports import EngineLimits, StepRing
from gateway.coordinator.block_scheduler.build import build_scheduler
from gateway.coordinator.block_scheduler.cost_file import cost_path, load_samples, save_samples
from gateway.coordinator.block_scheduler.cost_table import CostSample, CostTable
from gateway.coordinator.block_scheduler.scheduler import BlockScheduler, SchedulerSettings
from gateway.coordinator.block_scheduler.sweep import covered, is_whole, sweep, sweep_cells
from gateway.coordinator.block_scheduler.trees import blocks_within
from services.config import AppArgs
from services.drafter_kinds import DrafterKind
from services.placement import SAME_NODE
from services.spec import DrafterSpec, EngineSpec, file_digest

logger = logging.getLogger(__name__)


def fingerprint(args: AppArgs, spec: EngineSpec, layout: str) -> dict[str, object]:
    """Return everything that a step's time depends on, as JSON values.

    Args:
        layout: how coordinator, drafter and verifier share processes.
    """
    kind: dict[str, object] = {"deterministic": True} if spec.is_deterministic else {}
    kernel = spec.kernel_folder and kept_library(ROW_ATTENTION, Path(spec.kernel_folder))
    if kernel:
        kind["compiled"] = kernel
    if spec.num_ranks > 1:
        kind["ranks"] = spec.num_ranks
    if spec.placement != SAME_NODE:
        kind["placement"] = spec.placement
    return {
        **kind,
        "layout": layout,
        "device": device_name(spec.device),
        "models": [
            file_digest(spec.target_path),
            *(_drafter_digest(drafter, spec) for drafter in spec.drafters),
        ],
        "dtype": spec.dtype,
        "threads": [spec.verifier_threads, spec.drafter_threads],
        "link": args.link.model_dump(),
        "features": args.features.model_dump(),
        "draft_widths": args.block_scheduler.draft_widths,
        "has_trees": args.block_scheduler.allows_trees,
        "limits": [spec.max_rows, spec.max_step_positions, spec.num_pages, spec.page_size],
        "versions": [version(name) for name in ("dflash-serving", "torch", "transformers", "ray")],
    }


def _drafter_digest(drafter: DrafterSpec, spec: EngineSpec) -> str:
    """Tell drafters apart by what their time depends on."""
    if drafter.kind is DrafterKind.NGRAM:
        return f"{drafter.kind} {spec.chain_width} {spec.ngram_match}"
    digest = file_digest(drafter.path)
    return f"{digest} {spec.chain_width}" if drafter.kind.is_chain else digest


def device_name(device: str) -> str:
    """Name the hardware that runs the passes."""
    if device == "cpu":
        return f"{platform.machine()} {platform.processor()} {_cpu_model()}"
    import torch

    index = torch.cuda.current_device()
    return f"{torch.cuda.get_device_name(index)} driver {torch.version.cuda}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), "")


def measured_samples(
    args: AppArgs, spec: EngineSpec, ring: StepRing, limits: EngineLimits
) -> list[CostSample]:
    """Return the samples of an earlier start with the same fingerprint, or sweep. The engine must be idle.

    Raises:
        EngineUnavailableError: an executor was lost in the sweep.
    """
    mine = fingerprint(args, spec, type(ring).__name__)
    folder = _cost_folder(args.block_scheduler.cost_folder)
    if folder is not None:
        if known := load_samples(cost_path(folder, mine), mine):
            logger.info("step costs: %d samples out of %s", len(known), cost_path(folder, mine))
            return known
        logger.info("step costs: %s", _why_none(folder, mine))
    scheduler = args.block_scheduler
    if scheduler.sweep_s == 0:
        logger.info("step costs: not measured, for block_scheduler.sweep_s is 0; the table decides")
        return []
    most = limits.max_draft_block_size
    widths = sorted({1, *(width for width in scheduler.draft_widths if width <= most)})
    logger.info("step costs: measured now, for %g s at most", scheduler.sweep_s)
    began = time.perf_counter()
    wanted = SchedulerSettings().tree_blocks
    blocks = blocks_within(wanted, most) if scheduler.allows_trees else []
    samples = sweep(ring, limits, widths, scheduler.sweep_s, tree_blocks=blocks)
    took_s = time.perf_counter() - began
    logger.info("step costs: %d steps measured in %.1f s", len(samples), took_s)
    cells = sweep_cells(limits, widths, blocks)
    usable = covered(samples, cells)
    if not usable:
        logger.warning(
            "step costs: too few measured, the table decides; raise block_scheduler.sweep_s"
        )
        return []
    if not is_whole(samples, cells):
        # Kept, it would stand for what was never measured, start after start.
        logger.warning("step costs: not all measured, so not kept; raise block_scheduler.sweep_s")
    elif folder is not None:
        save_samples(cost_path(folder, mine), mine, samples)
    return usable


def _cost_folder(setting: str | None) -> Path | None:
    try:
        return None if setting is None else Path(setting).expanduser()
    except RuntimeError as error:  # a user without a home
        logger.warning("step costs are not kept in %s: %s", setting, error)
        return None


def _why_none(folder: Path, mine: Mapping[str, object]) -> str:
    """Say why no kept file is ours: there is none, or what the most similar one differs in."""
    differences = [_different_keys(path, mine) for path in sorted(folder.glob("costs-*.json"))]
    if not differences:
        return f"none are kept in {folder} yet"
    nearest = min(differences, key=len)
    return f"those kept in {folder} are of another {', '.join(nearest)}"


def _different_keys(path: Path, mine: Mapping[str, object]) -> list[str]:
    try:
        theirs = json.loads(path.read_text(encoding="utf-8"))["fingerprint"]
        return [key for key in mine if theirs.get(key) != mine[key]] or ["format"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ["format", *mine]


def scheduler_for(args: AppArgs, limits: EngineLimits, samples: list[CostSample]) -> BlockScheduler:
    """Return a new block scheduler for one lane."""
    has_plain = any(sample.is_plain for sample in samples)
    return build_scheduler(
        limits.max_draft_block_size,
        CostTable(samples) if has_plain else None,
        args.block_scheduler.table,
        SchedulerSettings(
            draft_widths=tuple(args.block_scheduler.draft_widths),
            target_tpot_ms=args.block_scheduler.target_tpot_ms,
            allows_trees=args.block_scheduler.allows_trees,
        ),
    )
