"""The drafter engine: ingest target features, then fill one draft block per row in one pass.

Holds tensors and no policy. Its context pool uses the same page tables as the verifier's, so a
prefix that is valid there is valid here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import embedding

from dflash_ops.attention import (
    AttentionForm,
    AttentionRow,
    StepAttention,
    Visible,
    plan_attention,
)
from dflash_ops.family_layers import packed_layers
from dflash_ops.fused_layer import PackedLayer
from dflash_ops.norms import RootMeanSquareNorm
from dflash_ops.paging import PagedPool
from dflash_ops.rotary import RotaryTables
from dflash_ops.sampling import SamplingRun, choose_tokens
from dflash_wire.processors import DraftBias
from dflash_wire.records import Ingest, Row
from drafter.biases import apply_biases
from drafter.borrowed import BorrowedWeights
from drafter.context import ContextProjection
from drafter.convolution import packed_draft_layers
from drafter.drafter import Draft, Drafter
from drafter.features import FeatureReader
from drafter.head import DraftHead
from drafter.model import DraftModel
from drafter.proposals import sample_drafts
from drafter.settings import heads_per_kv
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
        self._context = ContextProjection(
            model, is_projected
        )  # before the layers give their weights up
        self._has_convolutions = model.settings.convolution is not None
        self._layers: Sequence[PackedLayer] = (
            packed_draft_layers(model.layers)
            if self._has_convolutions
            else packed_layers(model.layers)
        )
        self._reaches = None if model.settings.sees_all else model.settings.reaches
        self._rotary = RotaryTables(model.rotary_emb, model.norm.weight)
        self._norm = RootMeanSquareNorm.of(model.norm)
        self._head = DraftHead(model, borrowed.head)
        self._heads_per_kv = heads_per_kv(model.config)
        own_embedding = model.embed_tokens
        self._embedding = borrowed.embedding if own_embedding is None else own_embedding.weight
        self._form = form
        self.borrowed = borrowed
        self.pool = pool
        self.feature_pools = list(feature_pools)
        self.dtype = borrowed.embedding.dtype
        hidden_size = model.config.hidden_size
        self._reader = FeatureReader(self.feature_pools, taps, hidden_size, self.dtype, pool.device)

    def _ingest(self, lanes: list[tuple[int, list[Ingest]]]) -> None:
        """Project all lanes' features at once and store every layer's keys and values."""
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
        self.pool.write(torch.cat(slots), self._context(features, self._rotary.at(positions)))

    def _draft(self, rows: list[Row]) -> list[Draft]:
        """One bidirectional pass over ``[anchor, MASK x (drafted width - 1)]`` of every row.

        Returns:
            the first ``width - 1`` draft tokens of each row, for the rest would not be verified, with what
            they were sampled from if the row samples them, or a tree of the whole block.
        """
        device = self.pool.device
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
            attention_rows, self._heads_per_kv, self.pool, self._reaches, self._form
        )
        if self._has_convolutions:
            places = [place for row in rows for place in range(row.drafted_width)]
            step.places = torch.tensor(places, device=device)
        hidden = self._pass(token_ids, positions, step)
        hidden = hidden[torch.tensor(chains.places + trees.places, device=device)]
        logits = self._head(hidden)
        # The mask token is a reserved id: the target never emits it, so neither may a draft.
        logits[:, self.model.mask_token_id] = -torch.inf
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

    def _pass(self, token_ids: list[int], positions: list[int], step: StepAttention) -> Tensor:
        """Draft layers and final norm over packed block tokens: ``[T, H]``."""
        model, device = self.model, self.pool.device
        ids = torch.tensor(token_ids, device=device)
        hidden = embedding(ids, self._embedding)
        if model.mask_embedding is not None:
            hidden[ids == model.mask_token_id] = model.mask_embedding
        hidden = hidden * model.embedding_scale
        rotation = self._rotary.at(positions)
        for layer in self._layers:
            hidden = layer(hidden, rotation, step)
        return self._norm(hidden)
