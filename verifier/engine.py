"""The verifier engine: one target pass over all rows of a step, then acceptance and commit.

Holds tensors and no policy. Everything it needs comes with the plan; everything in its pool can be
rebuilt from committed tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_ops.attention import AttentionRow, StepAttention, Visible, plan_attention
from dflash_ops.paging import PagedPool
from dflash_ops.sampling import SamplingRun, choose_tokens
from dflash_wire.errors import FatalError
from dflash_wire.records import DraftResult, Row, StepPlan, StepResult
from dflash_wire.trees import TreeOutcome
from verifier.acceptance import accept, ancestor_mask, chain_parents, chain_within, depths
from verifier.target import TargetModel


@dataclass(frozen=True, slots=True)
class PackedRow:
    """A row's place in the packed pass.

    Packed tokens ``[offset, offset + width)``; its logits are rows
    ``[logits_offset, logits_offset + num_logits)`` of the step's logits.
    """

    row: Row
    draft_token_ids: list[int]
    parents: list[int]
    scores: bytes
    """Of a tree's nodes, for whoever calibrates them."""
    is_chain: bool
    depths: list[int]
    offset: int
    width: int
    """Positions; of a tree with few nodes, fewer than planned."""
    logits_offset: int
    num_logits: int


def pack_rows(plan: StepPlan, drafts: DraftResult) -> list[PackedRow]:
    """Lay a plan's rows out one after another.

    Raises:
        FatalError: the drafts do not belong to this plan.
    """
    if drafts.step_id != plan.step_id or len(drafts.draft_token_ids) != len(plan.rows):
        raise FatalError(f"drafts of step {drafts.step_id} do not fit plan of step {plan.step_id}")
    packed: list[PackedRow] = []
    offset = logits_offset = 0
    for i, row in enumerate(plan.rows):
        draft_token_ids = drafts.draft_token_ids[i]
        num_drafts = len(draft_token_ids)
        is_short = row.is_tree and num_drafts < row.width
        if not row.is_prefill and num_drafts != row.width - 1 and not is_short:
            raise FatalError(
                f"step {plan.step_id}: {num_drafts} drafts for a row of width {row.width}"
            )
        chain = chain_parents(num_drafts)
        parents = (drafts.parents[i] if drafts.parents is not None else None) or chain
        is_chain = row.is_prefill or parents == chain
        if not is_chain or num_drafts >= row.most_kept:
            check_tree(row, parents, num_drafts)
        width = row.num_positions if row.is_prefill else num_drafts + 1
        num_logits = (1 if row.samples else 0) if row.is_prefill else width
        packed.append(
            PackedRow(
                row,
                draft_token_ids,
                parents,
                drafts.scores[i] if drafts.scores is not None else b"",
                is_chain,
                [*chain, num_drafts] if is_chain else depths(parents),
                offset,
                width,
                logits_offset,
                num_logits,
            )
        )
        offset += width
        logits_offset += num_logits
    return packed


def check_tree(row: Row, parents: list[int], num_drafts: int) -> None:
    """Check that every path of a row's tree ends where its pages end.

    Raises:
        FatalError: it does not, or this is no tree.
    """
    is_tree = len(parents) == num_drafts and all(0 <= p <= j for j, p in enumerate(parents))
    if not is_tree or max(depths(parents)) >= row.most_kept:
        raise FatalError(
            f"drafts of sequence {row.seq_id} are no tree of paths of {row.most_kept} positions"
        )


class VerifierEngine:
    """Runs steps on the target model.

    Owner of the target KV pool; nobody else writes it. Between steps the pool covers exactly the
    committed inputs of every sequence.

    Args:
        target: the loaded model.
        pool: its KV pool.
        feature_pool: ``[max_step_positions, K*H]``, shared with the drafter; written here only.
        target_layer_ids: tapped layers, in the drafter's order.
    """

    def __init__(
        self,
        target: TargetModel,
        pool: PagedPool,
        feature_pool: Tensor,
        target_layer_ids: list[int],
    ) -> None:
        self.target = target
        self.pool = pool
        self.feature_pool = feature_pool
        self.target_layer_ids = target_layer_ids

    @torch.inference_mode()
    def run(self, plan: StepPlan, drafts: DraftResult) -> StepResult:
        """Verify, sample, accept and commit one step. Mutates the pool and the feature pool.

        Raises:
            FatalError: plan and drafts do not fit together.
        """
        began = time.perf_counter()
        packed = pack_rows(plan, drafts)
        step = self._attention(packed)
        hidden, features = self.target.forward(
            self._token_ids(packed), self._positions(packed), step, self.target_layer_ids
        )
        chosen = self._choose(packed, hidden)
        committed, trees, kept, slots = self._accept(packed, chosen)
        self._commit(plan, step, features, kept, slots)
        verify_ms = (time.perf_counter() - began) * 1e3
        return StepResult(
            plan.step_id,
            committed,
            drafts.draft_ms,
            verify_ms,
            draft_began_s=drafts.began_s,
            verify_began_s=began,
            trees=trees if any(trees) else None,
        )

    def _attention(self, packed: list[PackedRow]) -> StepAttention:
        rows = []
        for p in packed:
            visible: Visible | Tensor = Visible.CAUSAL
            depths = None
            if not p.is_chain:
                visible, depths = ancestor_mask(p.parents), p.depths
            start = p.row.start_position
            rows.append(AttentionRow(p.offset, p.width, p.row.page_ids, start, visible, depths))
        heads_per_kv = self.target.num_heads // self.target.num_kv_heads
        return plan_attention(rows, heads_per_kv, self.pool, self.target.reaches)

    def _token_ids(self, packed: list[PackedRow]) -> Tensor:
        ids: list[int] = []
        for p in packed:
            ids += p.row.token_ids
            ids += p.draft_token_ids
        return torch.tensor(ids, dtype=torch.int64, device=self.target.device)

    def _positions(self, packed: list[PackedRow]) -> list[int]:
        positions: list[int] = []
        for p in packed:
            start = p.row.start_position
            if p.row.is_prefill:
                positions += range(start, start + p.width)
            else:
                positions += [start + depth for depth in p.depths]
        return positions

    def _choose(self, packed: list[PackedRow], hidden: Tensor) -> list[int]:
        """The target's token after every position that yields one, in logits order."""
        wanted: list[int] = []
        runs: list[SamplingRun] = []
        for p in packed:
            if p.num_logits == 0:
                continue
            end = p.logits_offset + p.num_logits
            last = p.row.start_position + p.width
            if p.row.is_prefill:
                wanted.append(p.offset + p.width - 1)
                runs.append(SamplingRun(p.logits_offset, end, last, p.row.sampling))
                continue
            wanted += range(p.offset, p.offset + p.width)
            places = tuple(p.row.start_position + 1 + depth for depth in p.depths)
            runs.append(SamplingRun(p.logits_offset, end, places[0], p.row.sampling, places))
        if not wanted:
            return []
        if len(wanted) != hidden.shape[0]:
            hidden = hidden[torch.tensor(wanted, device=hidden.device)]
        chosen: list[int] = choose_tokens(self.target.logits(hidden), runs).tolist()
        return chosen

    def _accept(
        self, packed: list[PackedRow], chosen: list[int]
    ) -> tuple[list[list[int]], list[TreeOutcome | None], list[int], list[Tensor]]:
        """Committed ids and tree per row, packed indices whose K/V are kept, and their slots per row."""
        committed: list[list[int]] = []
        trees: list[TreeOutcome | None] = []
        kept: list[int] = []
        slots: list[Tensor] = []
        for p in packed:
            mine = chosen[p.logits_offset : p.logits_offset + p.num_logits]
            start = p.row.start_position
            tree = None
            if p.row.is_prefill:
                committed.append(mine)
                nodes = list(range(p.width))
            else:
                acceptance = accept(p.draft_token_ids, mine, p.parents)
                committed.append(acceptance.token_ids)
                nodes = acceptance.nodes
                if p.row.is_tree:
                    accepted_nodes = [node - 1 for node in nodes[1:]]
                    chain = chain_within(p.parents, nodes)
                    tree = TreeOutcome(p.width - 1, accepted_nodes, p.scores, *chain)
            trees.append(tree)
            kept += [p.offset + node for node in nodes]
            slots.append(self.pool.slots(p.row.page_ids, start, start + len(nodes)))
        return committed, trees, kept, slots

    def _commit(
        self,
        plan: StepPlan,
        step: StepAttention,
        features: Tensor,
        kept: list[int],
        slots: list[Tensor],
    ) -> None:
        """Write the accepted path's K/V into pages, and its features to the front of the row's range.

        That range is the planned one: a tree may have turned out smaller.
        """
        device = self.pool.device
        index = torch.tensor(kept, dtype=torch.int64, device=device)
        step_kv = torch.stack(step.step_kv)  # [L, T, 2, G, D]
        self.pool.write(torch.cat(slots), step_kv[:, index])
        places: list[int] = []
        for first, row_slots in zip(plan.feature_offsets(), slots, strict=True):
            places += range(first, first + row_slots.shape[0])
        self.feature_pool.index_copy_(
            0, torch.tensor(places, device=device), features[index].to(self.feature_pool.dtype)
        )
