"""Where an engine group's actors run, and how features get from verifier to drafter there.

Plain values out of the configuration, decided once, before anything starts. Imports neither torch nor Ray.
"""

from __future__ import annotations

from typing import NamedTuple

from dflash_wire.errors import ConfigError
from services.config import AppArgs, ExecutorArgs

SAME_GPU, SAME_NODE, SPREAD = "same_gpu", "same_node", "spread"
SHM, CUDA_IPC, NIXL = "shm", "cuda_ipc", "nixl"
ALIAS, PULL = "alias", "pull"
DEVICES = {SHM: ("cpu",), CUDA_IPC: ("cuda",), NIXL: ("cpu", "cuda")}
MODES = {SHM: (ALIAS, PULL), CUDA_IPC: (ALIAS,), NIXL: (PULL,)}
"""The first is the one that ``auto`` takes."""
COORDINATOR_CPUS = 0.25
"""The replica itself needs a core's share besides its executors."""
DECIMALS = 4
"""That Ray looks at in an amount of a resource."""


class FeatureRoute(NamedTuple):
    """How the drafter gets at the verifier's features."""

    transport: str
    mode: str


ALIASED_SHM = FeatureRoute(SHM, ALIAS)


def choose_placement(args: AppArgs) -> str:
    """Return where executors go: what the configuration says, or what its resources allow.

    Raises:
        ConfigError: it says what they do not allow.
    """
    num_gpus = args.verifier.num_gpus + len(args.model.all_drafters) * args.drafter.num_gpus
    num_gpus = round(num_gpus, DECIMALS)  # 0.7 + 0.2 + 0.1 is less than 1
    is_one_verifier = args.verifier.tensor_parallel == args.drafter.shared_by == 1
    is_cuda = args.model.device == "cuda"
    fits_one_gpu = is_cuda and is_one_verifier and 0 < num_gpus <= 1
    if args.placement == "auto":
        return SAME_GPU if fits_one_gpu else SAME_NODE
    if args.placement == SAME_GPU and not fits_one_gpu:
        raise ConfigError(
            "placement same_gpu needs device cuda, one verifier, and num_gpus of verifier and drafters that "
            f"add up to 1 at most; they add up to {num_gpus:g}"
        )
    if args.placement == SPREAD and args.link.kind != "tcp":
        raise ConfigError("placement spread may use several nodes, so it needs link.kind tcp")
    return args.placement


def choose_route(args: AppArgs) -> FeatureRoute:
    """Return transport and mode for where the executors go.

    Raises:
        ConfigError: what is asked for does not work there.
    """
    placement, device = choose_placement(args), args.model.device
    transport: str = args.features.transport
    mode: str = args.features.mode
    if transport == "auto":
        transport = SHM if device == "cpu" else CUDA_IPC
        if placement == SPREAD or (device == "cuda" and placement != SAME_GPU):
            transport = NIXL
    if device not in DEVICES[transport]:
        raise ConfigError(f"features.transport {transport!r} does not work on device {device!r}")
    if transport == CUDA_IPC and placement != SAME_GPU:
        raise ConfigError("features.transport 'cuda_ipc' needs placement same_gpu")
    if transport == SHM and placement == SPREAD:
        raise ConfigError("features.transport 'shm' does not reach other nodes; take 'nixl'")
    if mode == "auto":
        mode = MODES[transport][0]
    if mode not in MODES[transport]:
        raise ConfigError(f"features.mode {mode!r} does not work with transport {transport!r}")
    return FeatureRoute(transport, mode)


def bundles(args: AppArgs, placement: str) -> list[dict[str, float]]:
    """Return the resources of an engine group as placement group bundles, the coordinator in the first.

    One bundle is on one node, and one with a single GPU is on one card. With ``spread`` every drafter has a
    bundle of its own; a verifier's ranks stay together.
    """
    num_verifiers = args.drafter.shared_by * args.verifier.tensor_parallel
    num_drafters = len(args.model.all_drafters)
    here: list[ExecutorArgs] = [args.verifier] * num_verifiers
    away: list[ExecutorArgs] = [args.drafter] * num_drafters
    groups = [[*here, *away]]
    if placement == SPREAD:
        groups = [here, *([one] for one in away)]
    found = []
    for place, executors in enumerate(groups):
        cpus = sum(executor.num_cpus for executor in executors)
        gpus = sum(executor.num_gpus for executor in executors)
        amounts = {"CPU": cpus + (COORDINATOR_CPUS if place == 0 else 0.0), "GPU": gpus}
        found.append({name: round(n, DECIMALS) for name, n in amounts.items() if n > 0})
    return found
