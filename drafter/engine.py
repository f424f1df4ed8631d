"""The drafter engine: ingest target features, then fill one draft block per row in one pass.

Holds tensors and no policy. Its context pool uses the same page tables as the verifier's, so a
prefix that is valid there is valid here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dflash_ops.attention import AttentionForm, AttentionRow, Visible, plan_attention
from dflash_ops.compiled_attention import RowKernel
from dflash_ops.paging import PagedPool
from dflash_ops.sampling import SamplingRun, choose_tokens
from dflash_ops.static_rows import BucketSizes
from dflash_wire.processors import DraftBias
from dflash_wire.records import Ingest, Row
from drafter.biases import apply_biases
from drafter.borrowed import BorrowedWeights
from drafter.drafter import Draft, Drafter
from drafter.features import FeatureReader
from drafter.model import DraftModel
from drafter.network import DraftNetwork
from drafter.proposals import sample_drafts
from drafter.static_draft import StaticDrafter
from drafter.tree import grow_trees


class SlotRuns:
    """Slots of some rows, whose logits will follow each other. Owner: one draft pass."""

    def __init__(self) -> None:
        self.places: list[int] = []
        """Packed block tokens of the slots."""
        self.runs: list[SamplingRun] = []
        """One per row, counting its slots from the first of these rows."""
        self.sizes: list[int] = []
        """Draft tokens that each row has verified at most."""
        self.biases: list[tuple[SamplingRun, DraftBias]] = []
        """Of rows that have any."""
        self.anchors: list[int] = []

    def add(self, first: int, num_slots: int, row: Row) -> None:
        """Append a row's slots, packed from ``first`` on. Mutates."""
        start = len(self.places)
        self.runs.append(
            SamplingRun(start, start + num_slots, row.start_position + 1, row.sampling)
        )
        self.places += range(first, first + num_slots)
        self.sizes.append(row.width - 1)
        if row.extras is not None and row.extras.draft_bias is not None:
            self.biases.append((self.runs[-1], row.extras.draft_bias))
        self.anchors.append(row.token_ids[-1])

    def behind(self, count: int) -> list[SamplingRun]:
        """The runs where ``count`` other logits come first."""
        if count == 0:
            return self.runs
        return [replace(r, start=r.start + count, end=r.end + count) for r in self.runs]


class DrafterEngine(Drafter):
    """Drafts blocks with a DFlash draft model; every lane has a FeaturePool of its own.

    Args:
        model: draft model, its attention set to ``dflash_ops.attention.GATHERED``; its layers give
            their weights up to the engine.
        borrowed: the target's embedding and head.
        pool: context pool with the draft model's layers; all lanes' pages.
        feature_pools: one per lane, ``[max_step_positions, U*H]``, shared with its verifier; read here
            only. U layers are tapped for all drafters of the target together.
        index: which rows and ingests are this drafter's.
        taps: places of this drafter's K layers among the U, in its own order; None: these are all.
        form: of attention over ``pool``; None: row by row.
        is_projected: the FeaturePools hold ``[rows, H]`` that the verifier has projected for this drafter.
    """

    def __init__(
        self,
        model: DraftModel,
        borrowed: BorrowedWeights,
        pool: PagedPool,
        feature_pools: Sequence[Tensor],
        index: int = 0,
        taps: list[int] | None = None,
        form: AttentionForm | None = None,
        is_projected: bool = False,
    ) -> None:
        super().__init__(index, pool.num_slots // pool.page_size // len(feature_pools))
        self.model = model
        self.network = DraftNetwork(model, borrowed, is_projected)
        self._form = form
        self.static: StaticDrafter | None = None
        """Ingests and rows that fit its buckets take that way."""
        self.borrowed = borrowed
        self.pool = pool
        self.feature_pools = list(feature_pools)
        self.dtype = borrowed.embedding.dtype
        hidden_size = model.config.hidden_size
        self._reader = FeatureReader(self.feature_pools, taps, hidden_size, self.dtype, pool.device)

    def use_static_passes(self, sizes: BucketSizes, limit_bytes: int) -> None:
        """Run what can be of ingests and drafts over static memory from now on. Mutates.

        Needs a form of attention over the context of all rows, a single lane, and a model for which
        ``static_draft.why_not_static`` has nothing to say.

        Args:
            sizes: of the draft pass's buckets.
            limit_bytes: of captured passes.
        """
        assert self._form is not None and not isinstance(self._form, RowKernel)
        assert len(self.feature_pools) == 1
        self.static = StaticDrafter(
            self.network,
            self.pool,
            self.feature_pools[0],
            self._reader,
            self._form,
            sizes,
            limit_bytes,
        )

    def _ingest(self, lanes: list[tuple[int, list[Ingest]]]) -> None:
        """Project all lanes' features at once and store every layer's keys and values."""
        if self.static is not None and self.static.ingest(lanes[0][1]):
            return
        features = self._reader.read(lanes)
        if features is None:
            return
        positions: list[int] = []
        slots: list[Tensor] = []
        for _, ingests in lanes:
            for i in ingests:
                end = i.start_position + i.num_tokens
                positions += range(i.start_position, end)
                slots.append(self.pool.slots(i.page_ids, i.start_position, end))
        self.pool.write(torch.cat(slots), self.network.context_kv(features, positions))

    def _draft(self, rows: list[Row]) -> list[Draft]:
        """One bidirectional pass over ``[anchor, MASK x (drafted width - 1)]`` of every row.

        Returns:
            the first ``width - 1`` draft tokens of each row, for the rest would not be verified, with what
            they were sampled from if the row samples them, or a tree of the whole block.
        """
        if self.static is not None and (bucket := self.static.bucket_of(rows)) is not None:
            return self.static.run(rows, bucket)
        device, network = self.pool.device, self.network
        token_ids: list[int] = []
        positions: list[int] = []
        attention_rows: list[AttentionRow] = []
        chains, trees = SlotRuns(), SlotRuns()
        for row in rows:
            offset, start = len(token_ids), row.start_position
            drafted = row.drafted_width
            token_ids += row.token_ids + [self.model.mask_token_id] * (drafted - 1)
            positions += range(start, start + drafted)
            attention_rows.append(AttentionRow(offset, drafted, row.page_ids, start, Visible.ALL))
            # Every token of the block has seen all of it, but only those that may be verified get a head.
            if row.is_tree:
                trees.add(offset + 1, drafted - 1, row)
            else:
                chains.add(offset + 1, row.width - 1, row)
        step = plan_attention(
            attention_rows, network.heads_per_kv, self.pool, network.reaches, self._form
        )
        if network.has_convolutions:
            places = [place for row in rows for place in range(row.drafted_width)]
            step.places = torch.tensor(places, device=device)
        ids = torch.tensor(token_ids, device=device)
        hidden = network.hidden(ids, positions, step)
        hidden = hidden[torch.tensor(chains.places + trees.places, device=device)]
        logits = network.logits(hidden)
        apply_biases(logits, chains.biases)
        apply_biases(logits[len(chains.places) :], trees.biases)
        if self.model.candidate_selector is not None:
            runs = chains.runs + trees.behind(len(chains.places))
            anchors = chains.anchors + trees.anchors
            logits = self.model.candidate_selector.rescore(hidden, logits, runs, anchors)
        drafts: list[Draft] = []
        if chains.runs:
            chosen: list[int] = choose_tokens(logits[: len(chains.places)], chains.runs).tolist()
            drafts = [chosen[run.start : run.end] for run in chains.runs]
            self._sample_again(logits, chains.runs, drafts)
            if not trees.runs:
                return drafts
        grown = grow_trees(logits[len(chains.places) :], trees.runs, trees.sizes)
        left, left_trees = iter(drafts), iter(grown)
        return [next(left_trees) if row.is_tree else next(left) for row in rows]

    def _sample_again(self, logits: Tensor, runs: list[SamplingRun], drafts: list[Draft]) -> None:
        """Replace the drafts of rows that are sampled by rejection. Mutates ``drafts``."""
        mine = [i for i, r in enumerate(runs) if r.params.samples_drafts]
        if mine:
            for i, draft in zip(mine, sample_drafts(logits, [runs[i] for i in mine]), strict=True):
                drafts[i] = draft
