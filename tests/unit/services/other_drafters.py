"""Engines with drafters that are not DFlash, over a random target, and requests that try them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from eagle_helpers import decoder_values, random_tensors, save_public
from local_engines import Collector, run
from tiny_models import save_target

from dflash_wire.ports import EngineLimits
from dflash_wire.records import GenerationRequest, StepPlan, StepResult
from dflash_wire.sampling import SamplingParams
from gateway.coordinator import Coordinator
from services.config import AppArgs
from services.local import LocalRing, build_local_ring
from services.spec import EngineSpec, make_spec

TAPS = [1, 2, 3]
VOCAB = 64
NUM_REQUESTS = 24
CHAINS = ("static:2", "static:5", "static:16", "adaptive")
TREES = ("static-tree:4", "static-tree:16")


def save_pair(path: Path) -> None:
    """A random target, and a random EAGLE-3 drafter of it."""
    save_target(path / "target", vocab_size=VOCAB, num_layers=6)
    taps = {"eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in TAPS]}
    values = decoder_values(kind="qwen3", eagle_config=taps)
    save_public(path / "eagle3", values, random_tensors(values, {}))


def spec_of(
    path: Path,
    drafter: str,
    drafters: dict[str, str] | None = None,
    num_pages: int = 40,
    max_context: int = 120,
) -> EngineSpec:
    """A spec whose pools run short, unless they are to be larger."""
    torch.set_num_threads(1)
    args: dict[str, Any] = {
        "model": {"target": str(path / "target"), "drafter": drafter, "drafters": drafters or {}},
        "engine": {
            "num_pages": num_pages,
            "page_size": 4,
            "max_step_positions": 96,
            "max_rows": 6,
            "max_context": max_context,
        },
    }
    return make_spec(AppArgs.model_validate(args))


def build(path: Path, drafter: str, **drafters: str) -> tuple[LocalRing, EngineLimits]:
    """The engines of ``spec_of``."""
    return build_local_ring(spec_of(path, drafter, drafters))


class WatchedRing:
    """The real ring, keeping what went around it."""

    def __init__(self, ring: LocalRing) -> None:
        self.ring = ring
        self.plans: list[StepPlan] = []
        self.results: list[StepResult] = []
        self.drafts: dict[int, list[list[int]]] = {}
        """Of every sequence, cycle by cycle."""

    def send(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.ring.send(plan)
        found = self.ring._in_flight[-1][1]
        for row, drafts in zip(plan.rows, found.draft_token_ids, strict=True):
            if row.width > 1:
                self.drafts.setdefault(row.seq_id, []).append(drafts)

    def receive(self, step_id: int) -> StepResult:
        self.results.append(self.ring.receive(step_id))
        return self.results[-1]


def mixed_requests(policies: tuple[str, ...], seed: int = 3) -> list[GenerationRequest]:
    """Prompts that begin alike and repeat themselves, at several temperatures."""
    rng = random.Random(seed)
    beginning = [rng.randrange(VOCAB) for _ in range(30)]
    requests = []
    for i in range(NUM_REQUESTS):
        word = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 5))]
        prompt = beginning[: rng.choice((0, 8, 13, 30))] + word * rng.randint(1, 4)
        temperature = rng.choice((0.0, 0.0, 0.7))
        requests.append(
            GenerationRequest(
                f"r{i}",
                prompt,
                rng.choice((1, 7, 25, 40)),
                SamplingParams(temperature, seed=i),
                rng.sample(range(VOCAB), k=rng.choice((0, 2))),
                policies[i % len(policies)],
            )
        )
    return requests


def answers(
    ring: Any, limits: EngineLimits, requests: list[GenerationRequest], **options: Any
) -> tuple[Collector, Coordinator]:
    """Run all requests to their ends."""
    sink = Collector()
    per_step = options.pop("per_step", 3)
    coordinator = Coordinator(ring, sink, limits, "off", **options)
    run(coordinator, requests, per_step)
    return sink, coordinator


def write_config(path: Path, **changes: Any) -> None:
    """Change keys of a ``config.json``."""
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
