"""Whether an engine's passes run over static memory, and over which sizes."""

from __future__ import annotations

import logging

from dflash_ops.attention import AttentionForm
from dflash_ops.compiled_attention import RowKernel
from dflash_ops.context_attention import GatheredKernel, PlainContext
from dflash_ops.static_rows import MOST_TOKENS, BucketSizes, bucket_sizes
from drafter import static_draft
from drafter.engine import DrafterEngine
from services.spec import EngineSpec
from verifier import static_verify
from verifier.engine import VerifierEngine

logger = logging.getLogger(__name__)


def use_for_verifier(engine: VerifierEngine, spec: EngineSpec, form: AttentionForm | None) -> None:
    """Let a verifier capture its passes where that is possible; says in the log what is in the way. Mutates.

    Args:
        engine: on a CPU it stays as it is.
        spec: of the engine.
        form: of attention over its pool.
    """
    obstacle = static_verify.why_not_static(engine.target)
    if spec.num_ranks > 1:
        obstacle = "several ranks share the target"
    if _wanted(spec, "verify", form, obstacle):
        sizes = static_sizes(spec, MOST_TOKENS, engine.target.max_positions, form)
        engine.use_static_passes(sizes, spec.graph_bytes)


def use_for_drafter(engine: DrafterEngine, spec: EngineSpec, form: AttentionForm | None) -> None:
    """The same for a drafter."""
    obstacle = static_draft.why_not_static(engine.network)
    if len(engine.feature_pools) > 1:
        obstacle = "several verifiers share the drafter"
    if _wanted(spec, "draft", form, obstacle):
        model = engine.model
        positions = int(model.config.max_position_embeddings)
        sizes = static_sizes(spec, model.draft_block_size, positions, form)
        engine.use_static_passes(sizes, spec.graph_bytes)


def _wanted(spec: EngineSpec, name: str, form: AttentionForm | None, obstacle: str | None) -> bool:
    if form is None or isinstance(form, RowKernel):
        return False
    if not spec.graph_bytes:
        logger.info("%s passes run without CUDA graphs: engine.graph_memory_mib is 0", name)
        return False
    if obstacle is not None:
        logger.warning("%s passes run without CUDA graphs: %s", name, obstacle)
    return obstacle is None


def static_sizes(
    spec: EngineSpec, max_width: int, max_positions: int, form: AttentionForm | None
) -> BucketSizes:
    """Sizes of an engine's passes.

    Args:
        spec: of the engine.
        max_width: tokens of the widest row; at most ``MOST_TOKENS``.
        max_positions: that the model can have.
        form: of its attention: some copy as many pages as the table has.
    """
    pages = -(-spec.longest_sequence(max_positions) // spec.page_size)
    copies = isinstance(form, GatheredKernel | PlainContext)
    width = min(max_width, MOST_TOKENS, spec.max_step_positions)
    return bucket_sizes(spec.max_rows, width, pages, spec.max_step_positions, copies)
