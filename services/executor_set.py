"""One set of an engine group's actors: verifiers with their ranks, and the drafters that they share."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dflash_wire.ports import EngineLimits
from services.config import AppArgs, ExecutorArgs
from services.executors import DrafterActor, VerifierActor
from services.placement import SPREAD
from services.ranks import RankActor
from services.spec import EngineSpec

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600


class Addresses(NamedTuple):
    """Where the executors of a set take steps."""

    drafters: list[str]
    verifiers: list[str]
    """By lane."""


def _create(cls: type, executor: ExecutorArgs, bundle: int, *arguments: Any) -> Any:
    """Start an actor in one of this replica's bundles, or anywhere where there are none."""
    group = ray.util.get_current_placement_group()
    placed = {}
    if group is not None:
        placed["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, bundle)
    return (
        ray.remote(cls)
        .options(
            num_cpus=executor.num_cpus,
            num_gpus=executor.num_gpus,
            # One answers pings while others load, serve direct transport, or compile a grammar.
            max_concurrency=3,
            max_restarts=0,
            enable_tensor_transport=True,
            **placed,
        )
        .remote(*arguments)
    )


def _get(references: list[Any]) -> list[Any]:
    """Wait for calls of the start-up."""
    results: list[Any] = ray.get(references, timeout=START_TIMEOUT_S)
    return results


class ExecutorSet:
    """The actors of one engine group from their start to the loss of one of them.

    Owner: the engine group. They are children of the creating process, so they end with it. All models
    load in parallel. A verifier's ranks follow each other: their links, and on CPUs their pinned threads,
    are numbered through.
    """

    def __init__(self, args: AppArgs, spec: EngineSpec) -> None:
        num_ranks = spec.num_ranks
        links = [args.link.for_lane(place) for place in range(spec.num_lanes * num_ranks)]
        self.verifiers = [
            _create(VerifierActor, args.verifier, 0, spec, link) for link in links[::num_ranks]
        ]
        self._ranks = [
            [
                _create(RankActor, args.verifier, 0, spec, links[lane * num_ranks + rank], rank)
                for rank in range(1, num_ranks)
            ]
            for lane in range(spec.num_lanes)
        ]
        is_spread = spec.placement == SPREAD
        self._drafters = [
            _create(
                DrafterActor, args.drafter, index + 1 if is_spread else 0, spec, args.link, index
            )
            for index in range(len(spec.drafters))
        ]

    def pair(self) -> tuple[EngineLimits, Addresses]:
        """Let ranks meet, and drafters and verifiers know each other.

        Raises:
            ConfigError: models that cannot work together; surfaces from the actors as Ray's task error.
        """
        for verifier, ranks in zip(self.verifiers, self._ranks, strict=True):
            if ranks:
                self._join(verifier, ranks)
        facts = _get([drafter.describe.remote() for drafter in self._drafters])
        paired = _get([verifier.pair.remote(facts) for verifier in self.verifiers])
        references = [reference for (reference,), _, _ in paired]
        verifier_addresses = [address for _, address, _ in paired]
        limits: EngineLimits = paired[0][2]
        drafter_addresses = _get(
            [drafter.attach.remote(references, facts) for drafter in self._drafters]
        )
        return limits, Addresses(drafter_addresses, verifier_addresses)

    def connect(self, addresses: Addresses, ring_addresses: list[str]) -> None:
        """Start the traffic; results of each lane go to its ring's address."""
        pairs = zip(self.verifiers, ring_addresses, strict=True)
        _get(
            [verifier.connect.remote(ring_address) for verifier, ring_address in pairs]
            + [
                drafter.connect.remote(addresses.verifiers, addresses.drafters)
                for drafter in self._drafters
            ]
        )

    def _join(self, verifier: Any, ranks: list[Any]) -> None:
        (place,) = _get([verifier.open_ranks.remote()])
        joined = [rank.join.remote(*place) for rank in ranks]
        _, *rank_addresses = _get([verifier.join_ranks.remote(*place), *joined])
        _get([verifier.lead_ranks.remote(rank_addresses)])

    def actors(self) -> list[tuple[str, Any]]:
        """All actors with what they are called in messages."""
        named = [("verifier", actor) for actor in self.verifiers]
        named += [("rank", actor) for ranks in self._ranks for actor in ranks]
        return named + [("drafter", actor) for actor in self._drafters]

    def close(self) -> None:
        """End all actors, alive or not."""
        for _, actor in self.actors():
            ray.kill(actor)
