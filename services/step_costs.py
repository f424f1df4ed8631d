"""What steps cost on this machine: an earlier start's measurement, or a new one."""

from __future__ import annotations

import logging
import platform
import time
from importlib.metadata import version
from pathlib import Path

from dflash_wire.ports import EngineLimits, StepRing
from gateway.coordinator.block_scheduler.build import build_scheduler
from gateway.coordinator.block_scheduler.cost_file import cost_path, load_samples, save_samples
from gateway.coordinator.block_scheduler.cost_table import CostSample, CostTable
from gateway.coordinator.block_scheduler.scheduler import BlockScheduler, SchedulerSettings
from gateway.coordinator.block_scheduler.sweep import sweep
from services.config import AppArgs
from services.spec import EngineSpec, file_digest

logger = logging.getLogger(__name__)


def fingerprint(args: AppArgs, spec: EngineSpec) -> dict[str, object]:
    """Return everything that a step's time depends on, as JSON values."""
    return {
        "device": device_name(spec.device),
        "models": [
            file_digest(path) for path in (spec.target_path, *(d.path for d in spec.drafters))
        ],
        "dtype": spec.dtype,
        "threads": [spec.verifier_threads, spec.drafter_threads],
        "link": args.link.model_dump(),
        "features": args.features.model_dump(),
        "draft_widths": args.block_scheduler.draft_widths,
        "limits": [spec.max_rows, spec.max_step_positions, spec.num_pages, spec.page_size],
        "versions": [version(name) for name in ("dflash-serving", "torch", "transformers", "ray")],
    }


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
    scheduler = args.block_scheduler
    folder = None if scheduler.cost_folder is None else Path(scheduler.cost_folder).expanduser()
    mine = fingerprint(args, spec)
    if folder is not None and (known := load_samples(cost_path(folder, mine), mine)):
        return known
    most = limits.max_draft_block_size
    widths = sorted({1, *(width for width in scheduler.draft_widths if width <= most)})
    began = time.perf_counter()
    samples = sweep(ring, limits, widths, scheduler.sweep_s)
    logger.info("%d steps measured in %.1f s", len(samples), time.perf_counter() - began)
    if folder is not None and samples:
        save_samples(cost_path(folder, mine), mine, samples)
    return samples


def scheduler_for(args: AppArgs, limits: EngineLimits, samples: list[CostSample]) -> BlockScheduler:
    """Return a new block scheduler for one lane."""
    has_plain = any(sample.width == 1 for sample in samples)
    return build_scheduler(
        limits.max_draft_block_size,
        CostTable(samples) if has_plain else None,
        args.block_scheduler.table,
        SchedulerSettings(
            draft_widths=tuple(args.block_scheduler.draft_widths),
            target_tpot_ms=args.block_scheduler.target_tpot_ms,
        ),
    )
