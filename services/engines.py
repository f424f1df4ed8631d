"""Builds the two engines from plain specs; used by the actors and by in-process composition."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from dflash_ops.attention import GATHERED, AttentionForm
from dflash_ops.paging import PagedPool
from dflash_wire.drafters import DrafterLimits
from dflash_wire.ports import EngineLimits
from drafter.borrowed import load_borrowed_weights
from drafter.checkpoint import load_draft_model
from drafter.checkpoint.eagle3 import load_eagle3_model
from drafter.checkpoint.pairing import check_values, pair_values
from drafter.checkpoint.target import target_values
from drafter.context import FeatureProjection
from drafter.drafter import Drafter
from drafter.eagle3.engine import Eagle3Drafter
from drafter.eagle3.model import Eagle3Model
from drafter.engine import DrafterEngine
from drafter.model import DraftModel
from drafter.ngram import NgramDrafter, NgramSettings
from services import static_passes
from services.attended_pools import PoolShape, attended_pool, plain_pool
from services.drafter_kinds import DrafterKind
from services.memory_check import check_memory
from services.model_files import end_token_ids
from services.spec import DraftFacts, EngineSpec
from verifier.engine import VerifierEngine
from verifier.grammars import GrammarPool, load_vocabulary
from verifier.rank_group import RankGroup
from verifier.ranks import RankEngine, RankLeader
from verifier.target import TargetModel

DraftSource = DraftModel | Eagle3Model | NgramSettings
"""What a drafter is built of."""


def torch_dtype(spec: EngineSpec) -> torch.dtype:
    """``spec.dtype`` as torch's."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def rank_group(spec: EngineSpec, rank: int, timeout_s: float) -> RankGroup:
    """One rank's place among those that share the target; it has not met the others yet."""
    return RankGroup(rank, spec.num_ranks, torch.device(spec.device), timeout_s)


def load_target(spec: EngineSpec, group: RankGroup | None = None) -> TargetModel:
    """Load the target model of ``spec``, or the share of one of its ranks.

    Raises:
        ConfigError: it cannot be loaded, or not split, or will not fit the card with what is put beside it.
    """
    check_memory(spec)
    return TargetModel(spec.target_path, torch_dtype(spec), torch.device(spec.device), group)


def load_drafter(spec: EngineSpec, index: int = 0) -> DraftSource:
    """Load one of the draft models of ``spec`` on its device.

    Raises:
        ConfigError: it cannot be loaded, or will not fit the card with what is put beside it.
    """
    check_memory(spec, index)
    drafter = spec.drafters[index]
    if drafter.kind is DrafterKind.NGRAM:
        return NgramSettings(*spec.ngram_match, spec.chain_width)
    path, dtype = Path(drafter.path), torch_dtype(spec)
    model: DraftModel | Eagle3Model
    if drafter.kind is DrafterKind.EAGLE3:
        depth = target_values(Path(spec.target_path))["num_target_layers"]
        model = load_eagle3_model(path, dtype, depth, spec.chain_width)
    else:
        model = load_draft_model(path, dtype, GATHERED)
    return model.to(torch.device(spec.device))


def draft_facts(model: DraftSource) -> DraftFacts:
    """Describe what a drafter is built of."""
    values = {} if isinstance(model, NgramSettings) else pair_values(model)
    return DraftFacts(values, model.target_layer_ids, model.draft_block_size)


def union_taps(all_taps: Sequence[list[int]]) -> list[int]:
    """The layers that any drafter taps, each once: what a row of the FeaturePool holds.

    The first drafter's come first and in its order, so an only drafter reads rows as they are. Where nobody
    taps any, it is the first layer: a pool of nothing is none.
    """
    return list(dict.fromkeys(layer for taps in all_taps for layer in taps)) or [0]


def taps_within(union: list[int], taps: list[int]) -> list[int] | None:
    """Places of a drafter's layers in the union; None when they are the union."""
    return None if taps == union else [union.index(layer) for layer in taps]


def check_pair(target: TargetModel, draft_config: dict[str, int], taps: list[int]) -> None:
    """Refuse a drafter that was not made for this target.

    Raises:
        ConfigError: naming both values that differ.
    """
    ours = {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_target_layers": target.num_layers,
    }
    check_values(draft_config, ours, taps)


def engine_limits(
    spec: EngineSpec, max_positions: int, draft_block_sizes: Sequence[int]
) -> EngineLimits:
    """What a coordinator may plan with; one draft block size per drafter."""
    pairs = zip(spec.drafters, draft_block_sizes, strict=True)
    drafters = [DrafterLimits(d.name, size, d.kind.reads_tokens) for d, size in pairs]
    return EngineLimits(
        num_pages=spec.num_pages,
        page_size=spec.page_size,
        max_step_positions=spec.max_step_positions,
        max_rows=spec.max_rows,
        max_context=spec.longest_sequence(max_positions),
        max_draft_block_size=max(draft_block_sizes, default=1),
        drafters=tuple(drafters),
    )


def target_pool(spec: EngineSpec, target: TargetModel) -> tuple[PagedPool, AttentionForm | None]:
    """A KV pool for a loaded target, or for a rank's share of one, and what attends over it."""
    shape = PoolShape(
        target.num_layers,
        spec.num_pages,
        target.num_heads,
        target.num_kv_heads,
        target.head_dim,
        target.dtype,
        target.device,
    )
    return attended_pool(spec, shape, is_plain=target.has_plain_attention)


def build_rank(spec: EngineSpec, target: TargetModel) -> RankEngine:
    """Put a rank's share of the target, from rank 1 on, behind its KV pool."""
    return RankEngine(target, *target_pool(spec, target))


def build_verifier(
    spec: EngineSpec,
    target: TargetModel,
    feature_pool: torch.Tensor,
    taps: list[int],
    ranks: RankLeader | None = None,
) -> VerifierEngine:
    """Put a loaded target behind its KV pool; ``ranks``: ``target`` is rank 0's share of it.

    Raises:
        ConfigError: the target cannot do what the spec asks, or the drafter's weights cannot be loaded.
    """
    pool, form = target_pool(spec, target)
    path, vocab_size = spec.target_path, target.vocab_size
    ends = end_token_ids(path)
    grammars = GrammarPool(lambda: load_vocabulary(path, vocab_size, ends))
    engine = VerifierEngine(
        target,
        pool,
        feature_pool,
        taps,
        is_deterministic=spec.is_deterministic,
        grammars=grammars,
        form=form,
        ranks=ranks,
        project=load_projection(spec) if spec.projects_features else None,
    )
    static_passes.use_for_verifier(engine, spec, form)
    return engine


def load_projection(spec: EngineSpec) -> FeatureProjection:
    """Load what the only drafter of ``spec`` does first to features, for the verifier to do it.

    Raises:
        ConfigError: the drafter cannot be loaded.
    """
    model = load_draft_model(Path(spec.drafter_path), torch_dtype(spec), GATHERED)
    for part in (model.fc, model.hidden_norm):
        part.to(torch.device(spec.device))
    return FeatureProjection(model)


def feature_width(spec: EngineSpec, target: TargetModel, taps: list[int]) -> int:
    """Elements of a row of the FeaturePool."""
    return (1 if spec.projects_features else len(taps)) * target.hidden_size


def build_drafter(
    spec: EngineSpec,
    model: DraftSource,
    feature_pools: Sequence[torch.Tensor],
    index: int = 0,
    taps: list[int] | None = None,
) -> Drafter:
    """Put what a drafter is built of behind its pool, which holds the pages of all lanes."""
    num_lanes = len(feature_pools)
    num_pages = spec.num_pages * num_lanes
    if isinstance(model, NgramSettings):
        return NgramDrafter(model, num_pages, spec.page_size, num_lanes, index)
    config = model.config
    dtype, device = torch_dtype(spec), torch.device(spec.device)
    num_heads = int(config.num_attention_heads)
    shape = PoolShape(
        config.num_hidden_layers,
        num_pages,
        num_heads,
        int(config.num_key_value_heads or num_heads),
        int(config.head_dim or config.hidden_size // num_heads),
        dtype,
        device,
    )
    borrowed = load_borrowed_weights(Path(spec.target_path), dtype, device)
    if isinstance(model, Eagle3Model):  # its passes of one token a row read row by row
        pool = plain_pool(spec, shape)
        return Eagle3Drafter(model, borrowed, pool, feature_pools, index, taps)
    pool, form = attended_pool(spec, shape, is_plain=model.settings.sees_all)
    engine = DrafterEngine(
        model,
        borrowed,
        pool,
        feature_pools,
        index,
        taps,
        form=form,
        is_projected=spec.projects_features,
    )
    static_passes.use_for_drafter(engine, spec, form)
    return engine
