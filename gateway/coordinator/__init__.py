"""The brain of one engine group: admission, batching, pages, commits.

Pure Python and NumPy behind two ports (``dflash_wire.ports``): no torch, no ray, no HTTP.
"""

from gateway.coordinator.coordinator import DEFAULT_MAX_WAITING, Coordinator
from gateway.coordinator.policy import BlockPolicy, parse_policy
from gateway.coordinator.stats import EngineSnapshot

__all__ = [
    "DEFAULT_MAX_WAITING",
    "BlockPolicy",
    "Coordinator",
    "EngineSnapshot",
    "parse_policy",
]
