"""The same coordinator and engines in one process: for batches, benchmarks and tests.

No Ray, no sockets. Features go through the same FeaturePool layout, in ordinary memory.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from dflash_wire.errors import ConfigError, error_from_wire
from dflash_wire.ports import EngineLimits
from dflash_wire.records import DraftResult, GenerationRequest, StepPlan, StepResult, TokenChunk
from drafter.drafter import Drafter
from gateway.coordinator.coordinator import Coordinator
from gateway.coordinator.policy import ADAPTIVE
from services.config import AppArgs
from services.engines import (
    build_drafter,
    build_verifier,
    check_pair,
    draft_facts,
    engine_limits,
    feature_width,
    load_drafter,
    load_target,
    taps_within,
    union_taps,
)
from services.spec import EngineSpec, make_spec
from services.step_costs import measured_samples, scheduler_for
from verifier.engine import VerifierEngine

ONE_AFTER_ANOTHER = (1,)
"""In one thread there is nothing for a second step in flight to overlap with."""


class LocalRing:
    """``StepRing`` by two function calls."""

    def __init__(self, drafters: Sequence[Drafter], verifier: VerifierEngine) -> None:
        self.drafters = drafters
        self.verifier = verifier
        self._in_flight: deque[tuple[StepPlan, DraftResult]] = deque()

    def send(self, plan: StepPlan) -> None:
        """Ingest and draft at once, as a drafter does that is ahead of the verifier."""
        drafts = DraftResult.nothing(plan)
        for index in plan.drafters:
            drafts = self.drafters[index].run(plan).merged(drafts)
        self._in_flight.append((plan, drafts))

    def receive(self, step_id: int) -> StepResult:
        """Verify in order; results of steps that were given up are dropped."""
        while True:
            plan, drafts = self._in_flight.popleft()
            result = self.verifier.run(plan, drafts)
            if plan.step_id == step_id:
                return result


def build_local_ring(spec: EngineSpec) -> tuple[LocalRing, EngineLimits]:
    """Load all models into this process: one verifier, whatever ``num_lanes`` says.

    Raises:
        ConfigError: a model cannot be loaded or a drafter does not match, or the target is to be split.
    """
    if spec.num_ranks > 1:
        raise ConfigError("verifier.tensor_parallel needs Ray's actors; in one process it is 1")
    target = load_target(spec)
    models = [load_drafter(spec, index) for index in range(len(spec.drafters))]
    facts = [draft_facts(model) for model in models]
    for drafter in facts:
        check_pair(target, drafter.config, drafter.taps)
    taps = union_taps([drafter.taps for drafter in facts])
    features = torch.zeros(
        (2 * spec.max_step_positions, feature_width(spec, target, taps)),
        dtype=target.dtype,
        device=target.device,
    )
    drafters = [
        build_drafter(spec, model, [features], index, taps_within(taps, model.target_layer_ids))
        for index, model in enumerate(models)
    ]
    ring = LocalRing(drafters, build_verifier(spec, target, features, taps))
    sizes = [drafter.draft_block_size for drafter in facts]
    return ring, engine_limits(spec, target.max_positions, sizes)


class LocalEngine:
    """A coordinator with its step loop in a thread; requests from any thread.

    With ``engine.policy: adaptive`` the first one on a machine measures what steps cost before it does
    anything else.

    Owner: the creator; ``close`` ends the loop.

    Raises:
        ConfigError: see ``build_local_ring``.
    """

    def __init__(self, args: AppArgs) -> None:
        spec = make_spec(args)
        self.spec = spec
        self._num_threads = max(spec.verifier_threads, spec.drafter_threads)
        self._queues: dict[str, queue.SimpleQueue[TokenChunk]] = {}
        ring, self.limits = build_local_ring(spec)
        self._verifier = ring.verifier
        scheduler = None
        if args.engine.policy == ADAPTIVE.name:  # nobody else asks what steps cost
            torch.set_num_threads(self._num_threads)
            samples = measured_samples(args, spec, ring, self.limits)
            scheduler = scheduler_for(args, self.limits, samples)
        self._coordinator = Coordinator(
            ring,
            self,
            self.limits,
            args.engine.policy,
            max_waiting=args.engine.max_waiting,
            caches_prefixes=args.engine.prefix_cache,
            cohorts=ONE_AFTER_ANOTHER,
            scheduler=scheduler,
        )
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # OpenMP's thread count belongs to the calling thread.
        torch.set_num_threads(self._num_threads)
        self._coordinator.run_forever()

    def publish(self, chunks: dict[str, list[TokenChunk]]) -> None:
        """``TokenSink``: hand chunks to whoever waits for them."""
        for mine in chunks.values():
            for chunk in mine:
                waiting = self._queues.get(chunk.request_id)
                if waiting is not None:
                    waiting.put(chunk)

    def generate(self, request: GenerationRequest) -> Iterator[TokenChunk]:
        """Yield chunks until one carries a finish reason; closing early cancels.

        Raises:
            DFlashError: the request was refused or the engine failed.
        """
        if request.processors is not None and request.processors.grammar:
            self._verifier.compile_grammar(request.processors.grammar)  # not in the step loop
        chunks: queue.SimpleQueue[TokenChunk] = queue.SimpleQueue()
        self._queues[request.request_id] = chunks
        is_finished = False
        try:
            self._coordinator.submit(request)
            while not is_finished:
                chunk = chunks.get()
                is_finished = chunk.finish_reason is not None or chunk.error is not None
                if chunk.error is not None:
                    raise error_from_wire(chunk.error)
                yield chunk
        finally:
            del self._queues[request.request_id]
            if not is_finished:
                self._coordinator.cancel(request.request_id)

    def close(self) -> None:
        """End the loop; live requests get an error."""
        self._coordinator.close()
        self._thread.join(timeout=30)
