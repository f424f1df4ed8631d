"""One packed pass of the target over the rows of a step, and what of it is kept.

Shape letters: T packed tokens, L layers, G key/value heads, D head size, K tapped layers, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_ops.attention import (
    AttentionForm,
    AttentionRow,
    StepAttention,
    Visible,
    plan_attention,
)
from dflash_ops.compiled_attention import RowKernel
from dflash_ops.paging import PagedPool
from dflash_ops.tokenwise import plan_tokenwise
from verifier.acceptance import ancestor_mask
from verifier.packing import PackedRow
from verifier.target import TargetModel


@dataclass(frozen=True, slots=True)
class PassOutput:
    """What a pass computed."""

    hidden: Tensor
    """``[T, H]`` after the final norm."""
    features: Tensor
    """``[T, K*H]``."""
    step: StepAttention
    """Holds the pass's own keys and values."""


class PackedPass:
    """A target behind its KV pool. Every rank of a split target has one, of its share.

    Owner of the pool: the engine that holds this. ``run`` reads it, ``keep`` alone writes it.

    Args:
        target: the loaded model.
        pool: its KV pool.
        form: of attention over ``pool``; None: row by row.
        is_deterministic: compute each token's attention as if it stood alone.
    """

    def __init__(
        self,
        target: TargetModel,
        pool: PagedPool,
        form: AttentionForm | None = None,
        is_deterministic: bool = False,
    ) -> None:
        self.target = target
        self.pool = pool
        self._form = form
        # The kernel does so unasked.
        self._is_tokenwise = is_deterministic and not isinstance(form, RowKernel)

    def run(self, packed: list[PackedRow], target_layer_ids: list[int]) -> PassOutput:
        """Run the target once over all rows. Mutates nothing that outlives the pass.

        Args:
            packed: at least one row.
            target_layer_ids: layers whose outputs become features, in this order.
        """
        step = self._attention(packed)
        positions = self._positions(packed)
        hidden, features = self.target.forward(
            self._token_ids(packed), positions, step, target_layer_ids
        )
        return PassOutput(hidden, features, step)

    def slots(self, packed: list[PackedRow], kept: list[list[int]]) -> list[Tensor]:
        """Where the kept tokens of every row belong in the pool, int64.

        Args:
            packed: the pass's rows.
            kept: packed indices of every row's kept tokens, one path each.
        """
        rows = [(p.row.page_ids, p.row.start_position) for p in packed]
        return [
            self.pool.slots(pages, start, start + len(mine))
            for (pages, start), mine in zip(rows, kept, strict=True)
        ]

    def keep(self, step: StepAttention, index: Tensor, slots: list[Tensor]) -> None:
        """Write kept keys and values into pages. Mutates the pool.

        Args:
            step: of the pass.
            index: ``[n]`` int64, packed indices of all rows' kept tokens.
            slots: of the same tokens, by row.
        """
        step_kv = torch.stack(step.step_kv)  # [L, T, 2, G, D]
        self.pool.write(torch.cat(slots), step_kv[:, index])

    def index_of(self, kept: list[list[int]]) -> Tensor:
        """Packed indices ``[n]`` int64 of all rows' kept tokens."""
        places = [i for mine in kept for i in mine]
        return torch.tensor(places, dtype=torch.int64, device=self.pool.device)

    def _attention(self, packed: list[PackedRow]) -> StepAttention:
        rows = []
        for p in packed:
            visible: Visible | Tensor = Visible.CAUSAL
            depths = None
            if not p.is_chain:
                visible, depths = ancestor_mask(p.parents), p.depths
            start = p.row.start_position
            rows.append(AttentionRow(p.offset, p.width, p.row.page_ids, start, visible, depths))
        if self._is_tokenwise:
            plan = plan_tokenwise(rows, self.pool, self.target.reaches)
            return StepAttention([], tokenwise=plan)
        heads_per_kv = self.target.num_heads // self.target.num_kv_heads
        return plan_attention(rows, heads_per_kv, self.pool, self.target.reaches, self._form)

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
