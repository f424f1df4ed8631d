"""The drafter engine: ingest target features, then fill one draft block per row in one pass.

Holds tensors and no policy. Its context pool uses the same page tables as the verifier's, so a
prefix that is valid there is valid here.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor
from torch.nn.functional import embedding

from dflash_ops.attention import AttentionRow, StepAttention, Visible, plan_attention
from dflash_ops.fused_layer import packed_layers
from dflash_ops.norms import RootMeanSquareNorm
from dflash_ops.paging import PagedPool
from dflash_ops.products import product_of
from dflash_ops.rotary import RotaryTables
from dflash_ops.sampling import SamplingRun, choose_tokens
from dflash_wire.records import DraftResult, Ingest, Row, StepPlan
from drafter.borrowed import BorrowedWeights
from drafter.context import ContextProjection
from drafter.model import DraftModel


class DrafterEngine:
    """Drafts blocks with a DFlash draft model.

    Owner of the context pool; nobody else writes it. After ``run`` it covers the committed inputs of
    every sequence in the plan, that is ``[0, anchor_position)``.

    Args:
        model: draft model, its attention set to ``dflash_ops.attention.GATHERED``; its layers give
            their weights up to the engine.
        borrowed: the target's embedding and head.
        pool: context pool with the draft model's layers.
        feature_pool: ``[max_step_positions, K*H]``, shared with the verifier; read here only.
    """

    def __init__(
        self, model: DraftModel, borrowed: BorrowedWeights, pool: PagedPool, feature_pool: Tensor
    ) -> None:
        self.model = model
        self._context = ContextProjection(model)  # before the layers give their weights up
        self._layers = packed_layers(model.layers)
        self._rotary = RotaryTables(model.rotary_emb, model.norm.weight)
        self._norm = RootMeanSquareNorm.of(model.norm)
        self._head = product_of(borrowed.head)
        self.borrowed = borrowed
        self.pool = pool
        self.feature_pool = feature_pool
        self.dtype = borrowed.embedding.dtype

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> DraftResult:
        """Ingest the previous step's features, then draft. Mutates the context pool.

        Returns:
            ``width - 1`` draft tokens for every verify row wider than 1, nothing for the others.
        """
        began = time.perf_counter()
        if plan.ingests:
            self._ingest(plan.ingests)
        drafts: list[list[int]] = [[] for _ in plan.rows]
        wide = [i for i, row in enumerate(plan.rows) if not row.is_prefill and row.width > 1]
        if wide:
            for i, token_ids in zip(wide, self._draft([plan.rows[i] for i in wide]), strict=True):
                drafts[i] = token_ids
        draft_ms = (time.perf_counter() - began) * 1e3
        return DraftResult(plan.step_id, drafts, draft_ms, began_s=began)

    def _ingest(self, ingests: list[Ingest]) -> None:
        """Project features once and store every layer's keys and values."""
        device = self.pool.device
        rows: list[int] = []
        positions: list[int] = []
        slots: list[Tensor] = []
        for i in ingests:
            end = i.start_position + i.num_tokens
            rows += range(i.feature_offset, i.feature_offset + i.num_tokens)
            positions += range(i.start_position, end)
            slots.append(self.pool.slots(i.page_ids, i.start_position, end))
        features = self.feature_pool[torch.tensor(rows, device=device)].to(self.dtype)
        self.pool.write(torch.cat(slots), self._context(features, self._rotary.at(positions)))

    def _draft(self, rows: list[Row]) -> list[list[int]]:
        """One bidirectional pass over ``[anchor, MASK x (width - 1)]`` of every row."""
        device = self.pool.device
        token_ids: list[int] = []
        positions: list[int] = []
        attention_rows: list[AttentionRow] = []
        wanted: list[int] = []
        runs: list[SamplingRun] = []
        for row in rows:
            offset, start = len(token_ids), row.start_position
            token_ids += row.token_ids + [self.model.mask_token_id] * (row.width - 1)
            positions += range(start, start + row.width)
            attention_rows.append(AttentionRow(offset, row.width, row.page_ids, start, Visible.ALL))
            runs.append(
                SamplingRun(len(wanted), len(wanted) + row.width - 1, start + 1, row.sampling)
            )
            wanted += range(offset + 1, offset + row.width)
        config = self.model.config
        heads_per_kv = config.num_attention_heads // int(
            config.num_key_value_heads or config.num_attention_heads
        )
        step = plan_attention(attention_rows, heads_per_kv, self.pool)
        hidden = self._pass(token_ids, positions, step)
        logits = self._head(hidden[torch.tensor(wanted, device=device)])
        # The mask token is a reserved id: the target never emits it, so neither may a draft.
        logits[:, self.model.mask_token_id] = -torch.inf
        chosen: list[int] = choose_tokens(logits, runs).tolist()
        return [chosen[run.start : run.end] for run in runs]

    def _pass(self, token_ids: list[int], positions: list[int], step: StepAttention) -> Tensor:
        """Draft layers and final norm over packed block tokens: ``[T, H]``."""
        model, device = self.model, self.pool.device
        ids = torch.tensor(token_ids, device=device)
        hidden = embedding(ids, self.borrowed.embedding) * model.embedding_scale
        rotation = self._rotary.at(positions)
        for layer in self._layers:
            hidden = layer(hidden, rotation, step)
        return self._norm(hidden)
