"""What an executor needs to build its engine, as plain values. Imports no torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from dflash_wire.errors import ConfigError
from services.config import AppArgs
from services.drafter_kinds import NGRAM_DRAFTER, DrafterKind, kind_of
from services.model_files import read_json
from services.model_paths import resolve_model_path
from services.placement import (
    ALIASED_SHM,
    SAME_NODE,
    FeatureRoute,
    choose_placement,
    choose_route,
)
from verifier.shard_rules import check_shardable


def file_digest(folder: str) -> str:
    """Tell a model's files apart without reading the weights: names, sizes and the config."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()):
        if path.is_file():
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            if path.name == "config.json":
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """One drafter."""

    name: str
    path: str
    """Empty for one without a model."""
    kind: DrafterKind = DrafterKind.DFLASH


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """What a verifier must know of a drafter; picklable."""

    config: dict[str, int]
    """Values that must agree with the target's."""
    taps: list[int]
    """Target layers whose outputs it reads, in its own order."""
    draft_block_size: int


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything an executor needs to build its engine; picklable."""

    target_path: str
    drafters: tuple[DrafterSpec, ...]
    """The default one first; empty: nobody drafts."""
    num_lanes: int
    """Verifiers that share the drafters."""
    dtype: str
    device: str
    num_pages: int
    page_size: int
    max_step_positions: int
    max_rows: int
    max_context: int
    verifier_threads: int
    drafter_threads: int
    is_deterministic: bool = False
    kernel_folder: str | None = None
    """Where compiled kernels are kept; None: nothing is compiled."""
    chain_width: int = 16
    """Longest block of drafters whose checkpoints know no limit."""
    ngram_match: tuple[int, int] = (2, 8)
    """Least and most tokens that prompt lookup compares."""
    num_ranks: int = 1
    """Processes that share the target."""
    placement: str = SAME_NODE
    features: FeatureRoute = ALIASED_SHM
    projects_features: bool = False
    """The verifier applies the drafter's ``fc`` and ``hidden_norm``."""
    graph_bytes: int = 0
    """Captured passes of one executor hold about so much; 0: nothing is captured."""

    @property
    def drafter_path(self) -> str:
        """The default drafter's; there must be one."""
        return self.drafters[0].path

    def longest_sequence(self, max_positions: int) -> int:
        """Tokens of the longest sequence that fits the target's positions and the pools."""
        return min(self.max_context, max_positions, self.num_pages * self.page_size)


def make_spec(args: AppArgs) -> EngineSpec:
    """Resolve model paths and flatten the arguments.

    Raises:
        ConfigError: a model cannot be found, the target cannot be split over so many ranks, or executors or
            features cannot go where they are to.
    """
    target_path = resolve_model_path(args.model.target)
    _check_ranks(args, target_path)
    drafters = tuple(_drafter_spec(name, model) for name, model in args.model.all_drafters.items())
    projects_features = args.features.projected_by == "verifier"
    if projects_features and [drafter.kind for drafter in drafters] != [DrafterKind.DFLASH]:
        raise ConfigError("features.projected_by 'verifier' needs one drafter, a DFlash one")
    return EngineSpec(
        target_path=target_path,
        drafters=drafters,
        num_lanes=args.drafter.shared_by,
        dtype=args.model.dtype,
        device=args.model.device,
        num_pages=args.engine.num_pages,
        page_size=args.engine.page_size,
        max_step_positions=args.engine.max_step_positions,
        max_rows=args.engine.max_rows,
        max_context=args.engine.max_context,
        verifier_threads=args.verifier.num_threads,
        drafter_threads=args.drafter.num_threads,
        is_deterministic=args.engine.deterministic,
        kernel_folder=args.engine.kernel_folder,
        chain_width=args.model.chain_width,
        ngram_match=args.model.ngram_match,
        num_ranks=args.verifier.tensor_parallel,
        placement=choose_placement(args),
        features=choose_route(args),
        projects_features=projects_features,
        graph_bytes=args.engine.graph_memory_mib * 2**20,
    )


def _check_ranks(args: AppArgs, target_path: str) -> None:
    """Refuse what does not work with several ranks before anything is loaded.

    Raises:
        ConfigError: with the reason.
    """
    num_ranks = args.verifier.tensor_parallel
    if num_ranks == 1:
        return
    if args.engine.deterministic:
        raise ConfigError(
            "engine.deterministic needs verifier.tensor_parallel 1: in which order ranks are summed up "
            "depends on how many tokens a pass has"
        )
    num_gpus = args.verifier.num_gpus
    if args.model.device == "cuda" and (num_gpus < 1 or num_gpus % 1):
        raise ConfigError(
            f"verifier.tensor_parallel {num_ranks} needs whole GPUs, but verifier.num_gpus is {num_gpus}: "
            "nccl joins no two ranks on one card"
        )
    check_shardable(read_json(Path(target_path) / "config.json", is_required=True), num_ranks)


def _drafter_spec(name: str, model: str) -> DrafterSpec:
    if model == NGRAM_DRAFTER:
        return DrafterSpec(name, "", DrafterKind.NGRAM)
    path = resolve_model_path(model)
    return DrafterSpec(name, path, kind_of(read_json(Path(path) / "config.json", is_required=True)))
