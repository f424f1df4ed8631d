"""Check and measure a GPU: ``make gpu-check``, or ``python -m services.gpu_check``.

Prints a table for every part and ends with one line of JSON. Parts do not depend on each other's success;
each one's result is in the output file before the next begins, so a run that is cut off keeps what it had,
and says that it was.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

from services.gpu_check import correctness, cycles, passes, references, two_processes
from services.gpu_check.report import CUT, FAILED, SKIPPED, PartResult, Report, render
from services.gpu_check.session import CutOff, NotHereError, NoTimeLeftError, Session
from services.gpu_check.shapes import DRY, FULL

Part = Callable[[Session, PartResult], None]
PARTS: dict[str, Part] = {
    "ceilings": passes.ceilings,
    "kernels": correctness.kernels,
    "graphs": correctness.graphs,
    "verify": passes.verify_passes,
    "draft": passes.draft_passes,
    "cycles": cycles.cycles,
    "without_graphs": passes.without_graphs,
    "two_processes": two_processes.two_processes,
    "ray_features": two_processes.ray_features,
    "hf_generate": references.hf_generate,
    "dflash_package": references.dflash_package,
    "trees": passes.trees,
}
BESIDE_CEILINGS = {"verify", "draft", "cycles"}
"""Parts whose figures stand beside what the card does at most."""
BUDGET_S = 440.0
CUT_OFF_STATUS = 128 + signal.SIGTERM


def run_part(name: str, part: Part, session: Session) -> PartResult:
    """Run one part; whatever it does, what it had found stays.

    Returns:
        its result; cut off, if the run was told to end or its time is over.
    """
    result = PartResult(name)
    began = time.perf_counter()
    try:
        with session.ending.interrupts():
            part(session, result)
    except NotHereError as error:
        result.status, result.reason = SKIPPED, str(error)
    except NoTimeLeftError:
        result.status, result.reason = CUT, "the run's time is over"
    except CutOff:
        result.status, result.reason = CUT, "the run was told to end"
    except Exception as error:
        traceback.print_exc()
        result.status, result.reason = FAILED, f"{type(error).__name__}: {error}"
    result.seconds = round(time.perf_counter() - began, 3)
    return result


def with_needed(names: Iterable[str]) -> list[str]:
    """Put ceilings before parts that cannot do without."""
    wanted = list(dict.fromkeys(names))
    if BESIDE_CEILINGS.isdisjoint(wanted):
        return wanted
    return ["ceilings", *(name for name in wanted if name != "ceilings")]


def run_parts(names: Iterable[str], session: Session, report: Report) -> None:
    """Run parts in order until the run is told to end; each is printed and kept at once."""
    for name in names:
        if session.ending.is_asked:
            break
        result = run_part(name, PARTS[name], session)
        report.add(result)
        print(render(result), flush=True)
    report.is_cut_off = session.ending.is_asked


def facts_of(session: Session) -> dict[str, Any]:
    """What the figures depend on."""
    facts: dict[str, Any] = {
        "device": platform.processor() or platform.machine(),
        "is_dry_run": not session.is_cuda,
        "shape": session.shape.name,
        "dtype": session.shape.dtype,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    if session.is_cuda:
        properties = torch.cuda.get_device_properties(session.device)
        facts |= {
            "device": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
        }
        facts["cuda"] = torch.version.cuda
    return facts


def main() -> int:
    """Command line entry.

    Returns:
        1 if a part failed or something that must hold does not, 2 where nothing can be measured or kept,
        143 if the run was told to end.
    """
    parser = argparse.ArgumentParser(prog="python -m services.gpu_check", description=__doc__)
    parser.add_argument(
        "--dry-run", action="store_true", help="a tiny pair on the CPU: figures mean nothing"
    )
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="and what they need"
    )
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="time of the whole run")
    parser.add_argument("--output", type=Path, default=Path("build/gpu-check.jsonl"))
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        print(
            "There is no CUDA device here; --dry-run goes through all parts on a CPU.",
            file=sys.stderr,
        )
        return 2
    device = torch.device("cpu") if options.dry_run else torch.device("cuda", 0)
    session = Session(DRY if options.dry_run else FULL, device, options.budget_s)
    signal.signal(signal.SIGTERM, session.ending)
    facts = facts_of(session)
    try:
        report = Report(options.output, facts)
    except OSError as error:
        print(f"error: results cannot be kept in {options.output}: {error}", file=sys.stderr)
        return 2
    print(", ".join(f"{key} {value}" for key, value in facts.items()), flush=True)
    if options.dry_run:
        print("A dry run: no figure below says anything about a GPU.")
    run_parts(with_needed(options.parts), session, report)
    if report.is_cut_off:
        print(
            "\nCut off: the run was told to end, and says nothing about parts that are not above."
        )
    print(json.dumps(report.summary()))
    if report.is_cut_off:
        return CUT_OFF_STATUS
    return 0 if report.is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
