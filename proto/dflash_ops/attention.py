"""Attention over paged context and the tokens of the current step, for ragged packed rows.

Registered in transformers' ``AttentionInterface`` as ``GATHERED``; model layers pass our metadata on
as the keyword argument ``step``. This is the gathered SDPA form: the reference in tests and the CPU's
serving path. Context keys/values are gathered from pages, the step's own follow them, one masked
SDPA runs per group of rows.

Shape letters: T packed tokens, R rows of a group, W widest row, C longest context, H query heads,
G key/value heads, D head size, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from dflash_ops.paging import PagedPool

# transformers takes any name with "flash" in it for a flash-attention kernel.
GATHERED = "gathered_paged"


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """One row: packed tokens ``[offset, offset + width)`` after ``context`` committed ones.

    ``page_ids`` covers the context; ``visible`` is ``[width, width]`` bool (query, key) within the row,
    None means all of it.
    """

    offset: int
    width: int
    page_ids: list[int]
    context: int
    visible: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Rows that attend together, padded to one width and one context length."""

    num_rows: int
    width: int
    context: int
    page_ids: (
        Tensor  # [R * P], enough for C + W; the step's own keys and values go behind the context
    )
    mask: Tensor | None  # [R, 1, queries, C + W] additive; queries = (H / G) * W
    packed_slice: slice | None  # set when the rows lie side by side without padding
    gather_index: Tensor | None  # [R * W] packed index of each padded place
    scatter_index: Tensor | None  # [n] padded places that are real
    packed_index: Tensor | None  # [n] where they go in the packed order


def _mask(
    rows: Sequence[AttentionRow], width: int, context: int, heads_per_kv: int, pool: PagedPool
) -> Tensor:
    """The additive mask ``[R, 1, (H / G) * W, C + W]``."""
    shape = (len(rows), width, context + width)
    visible = torch.zeros(shape, dtype=torch.bool, device=pool.device)
    for r, row in enumerate(rows):
        # Padding queries get the real queries' context too, so no softmax row is empty.
        visible[r, :, : row.context] = True
        inside = visible[r, : row.width, context : context + row.width]
        inside.copy_(torch.ones_like(inside) if row.visible is None else row.visible)
        visible[r, row.width :, context] = True
    mask = torch.zeros(shape, dtype=pool.dtype, device=pool.device)
    mask.masked_fill_(~visible, float("-inf"))
    return mask.repeat(1, heads_per_kv, 1)[:, None]


def build_group(rows: Sequence[AttentionRow], heads_per_kv: int, pool: PagedPool) -> AttentionGroup:
    """Pad ``rows`` to a common width and context length.

    Args:
        rows: at least one row, in packed order.
        heads_per_kv: H / G, so that grouped heads fold into the query axis.
        pool: where the context is; queries have its type.
    """
    device = pool.device
    width = max(row.width for row in rows)
    context = max(row.context for row in rows)
    is_even = all(row.width == width for row in rows)
    is_adjacent = all(a.offset + a.width == b.offset for a, b in pairwise(rows))
    is_masked = not is_even or any(row.context < context or row.visible is not None for row in rows)
    mask = _mask(rows, width, context, heads_per_kv, pool) if is_masked else None
    num_pages = -(-(context + width) // pool.page_size)
    padded: list[int] = []
    for row in rows:
        used = row.page_ids[: -(-row.context // pool.page_size)]
        padded += used + used[:1] * (num_pages - len(used)) if used else [0] * num_pages
    page_ids = torch.tensor(padded, dtype=torch.int64, device=device)
    if is_even and is_adjacent:
        packed = slice(rows[0].offset, rows[-1].offset + width)
        return AttentionGroup(len(rows), width, context, page_ids, mask, packed, None, None, None)
    gather: list[int] = []
    scatter: list[int] = []
    packed_places: list[int] = []
    for r, row in enumerate(rows):
        real = list(range(row.offset, row.offset + row.width))
        gather += real + [row.offset] * (width - row.width)
        scatter += range(r * width, r * width + row.width)
        packed_places += real
    as_index = [torch.tensor(x, device=device) for x in (gather, scatter, packed_places)]
    return AttentionGroup(len(rows), width, context, page_ids, mask, None, *as_index)


@dataclass(slots=True)
class StepAttention:
    """Metadata of one packed pass; collects the step's own keys and values layer by layer."""

    pool: PagedPool
    groups: list[AttentionGroup]
    step_kv: list[Tensor] = field(default_factory=list)  # L x [T, 2, G, D]


def _attend(
    group: AttentionGroup,
    query: Tensor,
    step_kv: Tensor,
    step: StepAttention,
    layer: int,
    scale: float,
) -> Tensor:
    """One group: ``query [R*W, H, D]``, ``step_kv [R*W, 2, G, D]`` -> ``[R*W, H, D]``."""
    rows, width = group.num_rows, group.width
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = step_kv.shape[2]
    kv = step.pool.gather(layer, group.page_ids).view(2, num_kv_heads, rows, -1, head_dim)
    kv = kv[:, :, :, : group.context + width]
    kv[:, :, :, group.context :] = step_kv.view(rows, width, 2, num_kv_heads, head_dim).permute(
        2, 3, 0, 1, 4
    )
    keys, values = kv.transpose(1, 2)  # [R, G, C + W, D] each
    folded = (
        query.view(rows, width, num_kv_heads, num_heads // num_kv_heads, head_dim)
        .permute(0, 2, 3, 1, 4)
        .reshape(rows, num_kv_heads, -1, head_dim)
    )  # [R, G, (H/G) * W, D]
    out = scaled_dot_product_attention(folded, keys, values, group.mask, scale=scale)
    unfolded = out.view(rows, num_kv_heads, -1, width, head_dim).permute(0, 3, 1, 2, 4)
    return unfolded.reshape(rows * width, num_heads, head_dim)


def attend_packed(
    query: Tensor, step_kv: Tensor, step: StepAttention, layer_idx: int, scale: float
) -> Tensor:
    """Attention of all packed tokens in one layer; records ``step_kv`` in ``step``.

    Args:
        query: ``[T, H, D]``, rotated.
        step_kv: ``[T, 2, G, D]`` of this step's own tokens.
        step: metadata of the pass.
        layer_idx: selects the pool's layer.
        scale: softmax scale.

    Returns:
        ``[T, H, D]``.
    """
    step.step_kv.append(step_kv)
    query, step_kv = query.contiguous(), step_kv.contiguous()
    if len(step.groups) == 1 and step.groups[0].packed_slice is not None:
        return _attend(step.groups[0], query, step_kv, step, layer_idx, scale)
    out = torch.empty_like(query)
    for group in step.groups:
        part = group.gather_index if group.packed_slice is None else group.packed_slice
        assert part is not None
        attended = _attend(group, query[part], step_kv[part], step, layer_idx, scale)
        if group.packed_slice is not None:
            out[group.packed_slice] = attended
        else:
            out[group.packed_index] = attended[group.scatter_index]
    return out


def gathered_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    *,
    step: StepAttention,
    **_: Any,
) -> tuple[Tensor, None]:
    """``attend_packed`` in the form of transformers' attention functions.

    Args:
        module: the attention layer; ``layer_idx`` selects the pool's layer.
        query: ``[1, H, T, D]``.
        key: ``[1, G, T, D]``.
        value: ``[1, G, T, D]``.
        attention_mask: ignored; visibility is in ``step``.
        scaling: softmax scale.
        dropout: ignored; serving only.
        step: metadata of this pass; its ``step_kv`` grows by this layer's ``[T, 2, G, D]``.

    Returns:
        ``[1, T, H, D]`` and None.
    """
    step_kv = torch.stack([key[0], value[0]], dim=1).permute(2, 1, 0, 3)  # [T, 2, G, D]
    layer_idx: int = module.layer_idx  # type: ignore[assignment]
    return attend_packed(query[0].transpose(0, 1), step_kv, step, layer_idx, scaling)[None], None


AttentionInterface.register(GATHERED, gathered_attention)
