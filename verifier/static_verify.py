"""The verify pass over memory that never moves: target, choice, acceptance and commit in one function.

Nothing in it waits for the host, so on a GPU it is captured per bucket and replayed. Steps that need more
than it does are packed as they are (``PackedPass``): those with prompts, processors, log-probabilities,
candidates that are left out (top-k, top-p, min-p), or rejection.

Shape letters: R rows, W tokens of a row, T = R * W, K tapped layers, H hidden, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from dflash_ops.context_attention import ContextAttention
from dflash_ops.graphs import StaticPasses
from dflash_ops.paging import PagedPool
from dflash_ops.sampling import choose_plainly
from dflash_ops.static_rows import (
    Bucket,
    BucketSizes,
    StaticRow,
    StaticRows,
    has_plain_sampling,
    seen_by_tree,
)
from dflash_wire.records import StepPlan
from verifier.acceptance import Acceptance
from verifier.device_acceptance import accept_on_device
from verifier.packing import PackedRow
from verifier.target import TargetModel


def why_not_static(target: TargetModel) -> str | None:
    """Why a target's passes cannot be over static memory; None if they can."""
    if target.reaches is not None:
        return "it has layers with a sliding window"
    if not all(layer.has_fixed_shapes for layer in target.layers):
        return "its layers choose experts, or are not ours"
    return None


class StaticVerifier:
    """Verify passes of one target, by bucket. Owner: ``VerifierEngine``, whose pools it writes.

    Args:
        target: for which ``why_not_static`` has nothing to say.
        pool: its KV pool, by page.
        feature_pool: ``[rows, K*H]``.
        target_layer_ids: tapped layers.
        context_attention: of the engine.
        sizes: of the buckets.
        limit_bytes: see ``StaticPasses``.
        project: see ``VerifierEngine``.
    """

    def __init__(
        self,
        target: TargetModel,
        pool: PagedPool,
        feature_pool: Tensor,
        target_layer_ids: list[int],
        context_attention: ContextAttention,
        sizes: BucketSizes,
        limit_bytes: int,
        project: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._target, self._pool, self._feature_pool = target, pool, feature_pool
        self._project = project
        self._target_layer_ids = target_layer_ids
        self._context_attention = context_attention
        self._sizes = sizes
        self._inputs = cache(partial(StaticRows, device=pool.device))  # by bucket
        self.passes = StaticPasses("verify", pool.device, limit_bytes)
        target.reserve_positions(sizes.num_positions(pool.page_size))

    def bucket_of(self, packed: Sequence[PackedRow]) -> Bucket | None:
        """The bucket that a step fits; None when it needs more than this pass does."""
        if not all(_is_plain(row) for row in packed):
            return None
        size = self._pool.page_size
        pages = max(-(-(p.row.start_position + max(p.depths) + 1) // size) for p in packed)
        samples = any(p.row.sampling.temperature > 0 for p in packed)
        return self._sizes.smallest([p.width for p in packed], pages, samples)

    def run(self, plan: StepPlan, packed: Sequence[PackedRow], bucket: Bucket) -> list[Acceptance]:
        """Verify, accept and commit one step; mutates both pools. Waits for the device once, at the end."""
        offsets = plan.feature_offsets()
        rows = [
            static_row(p, offset, bucket.pages) for p, offset in zip(packed, offsets, strict=True)
        ]
        found: list[list[int]] = self.launch(rows, bucket)[: len(rows)].tolist()
        return [acceptance_of(line) for line in found]

    def launch(
        self, rows: Sequence[StaticRow], bucket: Bucket, drafts: Tensor | None = None
    ) -> Tensor:
        """Give the device a pass; does not wait for it.

        Args:
            rows: of the step.
            bucket: that holds them.
            drafts: ``[R', N]`` int64 on the device, instead of those of the first R' rows.

        Returns:
            ``[R, 1 + 2 W]`` int64, for ``acceptance_of``; valid until the next pass.
        """
        inputs = self._inputs(bucket)
        inputs.fill(rows)
        if drafts is not None:
            num_rows, count = drafts.shape
            inputs["token_ids"][:num_rows, 1 : 1 + count] = drafts
        return self.passes.run(bucket, lambda: lambda: self._pass(inputs))

    def _pass(self, inputs: StaticRows) -> Tensor:
        """What is captured: see ``launch``."""
        target, pool = self._target, self._pool
        rows, width, _, samples = inputs.bucket
        heads_per_kv = target.num_heads // target.num_kv_heads
        step = inputs.attention(pool, heads_per_kv, self._context_attention)
        token_ids, positions = inputs["token_ids"], inputs.positions
        hidden, features = target.forward(
            token_ids.flatten(), positions.flatten(), step, self._target_layer_ids
        )
        logits = target.logits(hidden)  # [T, V]
        chosen = choose_plainly(
            logits,
            inputs.temperatures(width),
            inputs.seeds(width),
            positions.flatten() + 1,
            samples,
        ).view(rows, width)
        path = accept_on_device(
            token_ids,
            chosen,
            inputs["parents"],
            inputs["depths"],
            inputs.visible,
            inputs["num_tokens"],
        )
        self._commit(inputs, path.is_kept.flatten(), torch.stack(step.step_kv), features)
        return torch.cat([path.counts[:, None], path.token_ids, path.nodes], dim=1)

    def _commit(
        self, inputs: StaticRows, is_kept: Tensor, step_kv: Tensor, features: Tensor
    ) -> None:
        """Write the accepted paths' K/V ``[L, T, 2, G, D]`` and features ``[T, K*H]``.

        What is not kept stands in for the first row's anchor, which always is: it writes the same values to
        the same place once more. So the pools never hold anything else, not even in a spare slot.
        """
        source = torch.arange(is_kept.shape[0], device=is_kept.device)
        source = source.masked_fill(~is_kept, 0)
        slots = inputs.slots(self._pool.page_size).flatten()
        self._pool.write(slots[source], step_kv[:, source])
        places = (inputs["feature_offset"][:, None] + inputs["depths"]).flatten()
        features = features[source]
        if self._project is not None:
            features = self._project(features)
        self._feature_pool.index_copy_(0, places[source], features.to(self._feature_pool.dtype))


def _is_plain(p: PackedRow) -> bool:
    is_verified = not p.row.is_prefill and p.row.extras is None
    return is_verified and has_plain_sampling(p.row.sampling)


def static_row(p: PackedRow, feature_offset: int, num_pages: int) -> StaticRow:
    """A verify row as the pass wants it; of its page table as much as the bucket holds."""
    row = p.row
    return StaticRow(
        row.token_ids + p.draft_token_ids,
        row.start_position,
        row.page_ids[:num_pages],
        p.width,
        None if p.is_chain else seen_by_tree(p.parents),
        None if p.is_chain else p.parents,
        None if p.is_chain else p.depths,
        feature_offset,
        row.sampling,
    )


def acceptance_of(line: Sequence[int]) -> Acceptance:
    """A row of a pass's result: how many tokens are committed, then these, then their nodes."""
    count, width = line[0], (len(line) - 1) // 2
    return Acceptance(list(line[1 + width :][:count]), list(line[1:][:count]))
