"""What the two-actor design costs per cycle: ``make bench-overhead``.

The same engines and the same coordinator code run the same request twice per repeat: in one process
(two function calls) and around the ring of real actors. Both are timed by the coordinator's ring call;
repeats alternate. Overhead of a cycle = ring wall time - draft time - verify time, each taken where it
is spent.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import ray
import torch

from dflash_wire.ports import StepRing
from dflash_wire.records import GenerationRequest, StepPlan, StepResult, TokenChunk
from gateway.coordinator.coordinator import Coordinator
from services.config import AppArgs
from services.engine_group import EngineGroup
from services.links import pin_thread
from services.local import build_local_ring
from services.spec import make_spec
from services.yaml_args import read_app_args


@dataclass(slots=True)
class TimedRing:
    """Passes steps on and keeps the wall, draft and verify time of each cycle, in ms."""

    ring: StepRing
    cycles: list[tuple[float, float]] = field(default_factory=list)
    _began: float = 0.0
    _is_cycle: bool = False

    def send(self, plan: StepPlan) -> None:
        """Send one step; prefill steps are not cycles and are not kept."""
        self._began = time.perf_counter()
        self._is_cycle = not any(row.is_prefill for row in plan.rows)
        self.ring.send(plan)

    def receive(self, step_id: int) -> StepResult:
        """Wait for it."""
        result = self.ring.receive(step_id)
        wall_ms = (time.perf_counter() - self._began) * 1e3
        if self._is_cycle:
            self.cycles.append((wall_ms, wall_ms - result.draft_ms - result.verify_ms))
        return result


class _Discard:
    def publish(self, chunks: dict[str, list[TokenChunk]]) -> None:
        """Nobody reads the tokens of a benchmark."""


def run_request(coordinator: Coordinator, request: GenerationRequest) -> None:
    """Drive one request to its end in the calling thread."""
    coordinator.submit(request)
    while coordinator.step():
        pass


def measure(args: AppArgs, policy: str, num_tokens: int, repeats: int) -> dict[str, object]:
    """Alternate both designs; returns medians in ms per cycle."""
    spec = make_spec(args)
    torch.set_num_threads(args.verifier.num_threads)
    local, limits = build_local_ring(spec)
    group = EngineGroup(args, spec)
    pin_thread(args.link.pin_cpu)
    rings = {"one process": TimedRing(local), "two actors": TimedRing(group.ring)}
    coordinators = {
        name: Coordinator(ring, _Discard(), limits, policy, cohorts=(1,))
        for name, ring in rings.items()
    }
    prompt = torch.randint(4, 1000, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    for repeat in range(repeats + 1):
        for name, coordinator in coordinators.items():
            run_request(coordinator, GenerationRequest(f"{name}-{repeat}", prompt, num_tokens))
        if repeat == 0:  # warm-up
            for ring in rings.values():
                ring.cycles.clear()
    group.close()
    table: dict[str, dict[str, float]] = {}
    for name, ring in rings.items():
        walls, overheads = zip(*ring.cycles, strict=True)
        table[name] = {
            "cycles": len(walls),
            "cycle_ms": round(statistics.median(walls), 3),
            "overhead_ms": round(statistics.median(overheads), 3),
            "overhead_p95_ms": round(statistics.quantiles(overheads, n=20)[-1], 3),
        }
    added = table["two actors"]["cycle_ms"] - table["one process"]["cycle_ms"]
    return {
        "policy": policy,
        "designs": table,
        "added_ms_per_cycle": round(added, 3),
        "overhead_share": round(
            table["two actors"]["overhead_ms"] / table["two actors"]["cycle_ms"], 4
        ),
        "bar": "median overhead <= 1.0 ms per cycle at one stream",
        "bar_met": table["two actors"]["overhead_ms"] <= 1.0,
    }


def main() -> None:
    """Print one table per feature mode and a last line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m services.bench_overhead", description=__doc__)
    parser.add_argument(
        "--config", type=Path, default=Path("config.yaml"), help="as for make serve"
    )
    parser.add_argument("--policy", default="static:8", help="'off' or 'static:<w>'")
    parser.add_argument("--tokens", type=int, default=160, help="output tokens per request")
    parser.add_argument("--repeats", type=int, default=5, help="requests per design")
    options = parser.parse_args()
    args = read_app_args(options.config)
    ray.init(include_dashboard=False, log_to_driver=False)
    reports = []
    for mode in ("alias", "pull"):
        features = args.features.model_copy(update={"mode": mode})
        report = measure(
            args.model_copy(update={"features": features}),
            options.policy,
            options.tokens,
            options.repeats,
        )
        reports.append({"mode": mode, **report})
        print(f"\nfeatures.mode {mode}, policy {options.policy}, one stream")
        print(f"{'design':<14}{'cycles':>8}{'cycle ms':>10}{'overhead ms':>13}{'p95':>8}")
        for name, row in reports[-1]["designs"].items():  # type: ignore[attr-defined]
            print(
                f"{name:<14}{row['cycles']:>8}{row['cycle_ms']:>10}"
                f"{row['overhead_ms']:>13}{row['overhead_p95_ms']:>8}"
            )
        print(f"overhead share of the cycle: {100 * float(str(report['overhead_share'])):.1f} %")
    print(json.dumps(reports))
    ray.shutdown()


if __name__ == "__main__":
    main()
