"""Attention over paged context and the tokens of the current step, for ragged packed rows.

Registered in transformers' ``AttentionInterface`` as ``GATHERED``; model layers pass our metadata on
as the keyword argument ``step``. A row's attention has two parts: its committed context, all of which
every query sees, and the step's own tokens under the row's mask. Each part gives an output and the
logarithm of its sum of exponentials; the two are merged by these. So no context is
padded or, where its pages follow each other, even copied; it is masked only where a layer has a window that
the context exceeds. That always works. Where there is an ``AttentionForm``, it attends all rows at once: a
``RowKernel`` (CPU, ``compiled_attention``) context and own tokens, a ``ContextAttention`` (GPU,
``context_attention``) context only, from a pool that lies by page; the own tokens are then done here.

Layers may differ in how far they reach (``visibility.Reach``); the rows of a pass are then arranged once per
kind of layer.

Shape letters: T packed tokens, R rows of a group, W their width, C a row's context length, H query heads,
G key/value heads, D head size, L layers. Queries of one key/value head lie together: ``Q = (H / G) * W``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from dflash_ops.attention_groups import AttentionGroup, group_rows
from dflash_ops.compiled_attention import CompiledPlan, RowKernel
from dflash_ops.context_attention import ContextAttention
from dflash_ops.packed_context import PackedContext, pack_context
from dflash_ops.paging import PagedPool
from dflash_ops.tokenwise import TokenwisePlan, attend_tokenwise
from dflash_ops.visibility import EVERYTHING, AttentionRow, Reach, Visible

__all__ = [
    "GATHERED",
    "AttentionForm",
    "AttentionGroup",
    "AttentionRow",
    "Reach",
    "StepAttention",
    "Visible",
    "attend_last",
    "attend_packed",
    "gathered_attention",
    "plan_attention",
]

AttentionForm = RowKernel | ContextAttention
"""What attends all rows of a pass at once. ``RowKernel``, on CPUs: their context and their own tokens.
``ContextAttention``, on GPUs: their context only, from a pool that lies by page."""

# transformers takes any name with "flash" in it for a flash-attention kernel.
GATHERED = "gathered_paged"


@dataclass(slots=True)
class StepAttention:
    """Metadata of one packed pass; collects the step's own keys and values layer by layer."""

    groups: list[AttentionGroup]
    step_kv: list[Tensor] = field(default_factory=list)  # L x [T, 2, G, D]
    by_layer: list[list[AttentionGroup]] | None = None
    """Of every layer, where they differ; ``groups`` is the first layer's."""
    tokenwise: TokenwisePlan | None = None
    """In place of ``groups``, where tokens may not depend on what stands beside them."""
    compiled: CompiledPlan | None = None
    """In place of ``groups``, where a kernel takes all rows at once."""
    context: PackedContext | None = None
    """Of all rows together, for layers whose groups are apart from it."""
    context_attention: ContextAttention | None = None
    """How it is attended."""
    places: Tensor | None = None
    """``[T]`` int64, each token's place in its row, for layers that look at the tokens before."""


def plan_attention(
    rows: Sequence[AttentionRow],
    heads_per_kv: int,
    pool: PagedPool,
    reaches: Sequence[Reach] | None = None,
    form: AttentionForm | None = None,
) -> StepAttention:
    """Prepare a pass over ``rows``.

    Args:
        rows: at least one, in packed order.
        heads_per_kv: H / G.
        pool: where the context is; queries have its type.
        reaches: of every layer; None: all see what rows say.
        form: of attention over this pool, taken where it can do what rows and layers need; None: row by row.
            With a ``ContextAttention`` rows read all of their context.
    """
    if isinstance(form, RowKernel):
        if reaches is None and (plan := form.plan(rows)) is not None:
            return StepAttention([], compiled=plan)
        form = None
    is_apart = form is not None
    if reaches is None:
        step = StepAttention(group_rows(rows, heads_per_kv, pool, EVERYTHING, is_apart))
    else:
        kinds = {
            reach: group_rows(rows, heads_per_kv, pool, reach, is_apart and reach.window is None)
            for reach in dict.fromkeys(reaches)
        }
        step = StepAttention(kinds[reaches[0]], by_layer=[kinds[reach] for reach in reaches])
    if is_apart:
        step.context, step.context_attention = pack_context(rows, pool), form
    return step


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """One part: ``query [R, G, Q, D]``, ``key`` and ``value [R, G, K, D]``.

    Returns:
        output ``[R, G, Q, D]`` and log-sum-exp ``[R, G, Q]`` in float32.
    """
    if query.device.type == "cpu":
        partial: tuple[Tensor, Tensor] = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
                query, key, value, attn_mask=mask, scale=scale
            )
        )
        return partial
    return _attend_in_parts(query, key, value, mask, scale)


def _attend_in_parts(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """``_attend`` out of basic operators, for every device."""
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * scale
    if mask is not None:
        scores = scores + mask
    weights = scores.softmax(dim=-1).to(value.dtype)
    return torch.matmul(weights, value), scores.logsumexp(dim=-1)


def _attend_contexts(
    group: AttentionGroup, query: Tensor, layer: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The context part of all rows of a group; a row without context weighs nothing."""
    parts = []
    for row, (context, mask) in enumerate(zip(group.contexts, group.context_masks, strict=True)):
        mine = query[row : row + 1]
        if context is None:
            nothing = mine.new_full(mine.shape[:-1], float("-inf"), dtype=torch.float32)
            parts.append((torch.zeros_like(mine), nothing))
        else:
            parts.append(_attend(mine, *context.layer(layer), mask, scale))
    if len(parts) == 1:
        return parts[0]
    outputs, weights = zip(*parts, strict=True)
    return torch.cat(outputs), torch.cat(weights)


def _fold(values: Tensor, rows: int, num_kv_heads: int) -> Tensor:
    """``[R*W, H, ...]`` -> ``[R, G, Q, ...]``: queries of one key/value head together."""
    width = values.shape[0] // rows
    apart = values.reshape(rows, width, num_kv_heads, -1, *values.shape[2:])
    return apart.permute(0, 2, 3, 1, *range(4, apart.dim())).flatten(2, 3)


def _attend_group(
    group: AttentionGroup,
    query: Tensor,
    step_kv: Tensor,
    layer: int,
    scale: float,
    sinks: Tensor | None,
    context: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """``query [R*W, H, D]``, ``step_kv [R*W, 2, G, D]`` -> ``[R*W, H, D]``.

    Without a mask, rows may have more keys of their own than queries: ``step_kv [R*K, 2, G, D]``.
    ``context`` is what was attended apart: output ``[R*W, H, D]`` and log-sum-exp ``[R*W, H]``.
    """
    rows, width = group.num_rows, group.width
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = step_kv.shape[2]
    folded = (
        query.reshape(rows, width, num_kv_heads, num_heads // num_kv_heads, head_dim)
        .permute(0, 2, 3, 1, 4)
        .reshape(rows, num_kv_heads, -1, head_dim)
    )
    own = step_kv.reshape(rows, -1, 2, num_kv_heads, head_dim).permute(2, 0, 3, 1, 4)
    out, weight = _attend(folded, own[0], own[1], group.mask, scale)
    if context is not None or any(group.contexts):
        if context is None:
            context_out, context_weight = _attend_contexts(group, folded, layer, scale)
        else:
            context_out, context_weight = (_fold(part, rows, num_kv_heads) for part in context)
        share = (weight - context_weight).sigmoid_()[..., None]
        out = torch.lerp(context_out, out, share.to(out.dtype))
        if sinks is not None:
            weight = torch.logaddexp(weight, context_weight)
    if sinks is not None:
        per_query = sinks.float().view(num_kv_heads, -1).repeat_interleave(width, dim=1)  # [G, Q]
        out = out * (weight - per_query).sigmoid_()[..., None].to(out.dtype)
    unfolded = out.reshape(rows, num_kv_heads, -1, width, head_dim).permute(0, 3, 1, 2, 4)
    return unfolded.reshape(rows * width, num_heads, head_dim)


def attend_packed(
    query: Tensor,
    step_kv: Tensor,
    step: StepAttention,
    layer_idx: int,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of all packed tokens in one layer; records ``step_kv`` in ``step``.

    Args:
        query: ``[T, H, D]``, rotated.
        step_kv: ``[T, 2, G, D]`` of this step's own tokens.
        step: metadata of the pass.
        layer_idx: selects the pool's layer.
        scale: softmax scale.
        sinks: ``[H]``, of every head the score of a key without a value; None: there are none.

    Returns:
        ``[T, H, D]``.
    """
    step.step_kv.append(step_kv)
    if step.tokenwise is not None:
        assert sinks is None  # such layers are refused at start
        return attend_tokenwise(query, step_kv, step.tokenwise, layer_idx, scale)
    if step.compiled is not None:
        assert sinks is None  # layers with sinks have windows too
        return step.compiled.attend(query, step_kv, layer_idx, scale)
    groups = step.groups if step.by_layer is None else step.by_layer[layer_idx]
    context = None
    if groups[0].is_apart and step.context is not None:
        assert step.context_attention is not None
        context = step.context_attention(query, layer_idx, step.context, scale)
    if len(groups) == 1:  # all tokens in their order
        return _attend_placed(groups[0], query, step_kv, layer_idx, scale, sinks, context)
    out = torch.empty_like(query)
    for group in groups:
        out[group.kept_place] = _attend_placed(
            group, query, step_kv, layer_idx, scale, sinks, context
        )
    return out


def attend_last(
    query: Tensor, own_kv: Tensor, step: StepAttention, layer_idx: int, scale: float
) -> Tensor:
    """Attention of the last token of each row, where those before it have keys and values already.

    Args:
        query: ``[R, H, D]``, rotated.
        own_kv: ``[R, K, 2, G, D]`` of the row's own tokens, the last one's last.
        step: metadata of a pass of as many rows of width 1, all causal.
        layer_idx: selects the pool's layer.
        scale: softmax scale.

    Returns:
        ``[R, H, D]``.
    """
    (group,) = step.groups
    return _attend_group(group, query, own_kv.flatten(0, 1), layer_idx, scale, None)


def _attend_placed(
    group: AttentionGroup,
    query: Tensor,
    step_kv: Tensor,
    layer: int,
    scale: float,
    sinks: Tensor | None,
    context: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """A group's tokens out of all packed ones, attended, without filling ``[kept, H, D]``."""
    place = group.place
    if context is not None:
        context = context[0][place], context[1][place]
    out = _attend_group(group, query[place], step_kv[place], layer, scale, sinks, context)
    return out if group.kept is None else out[group.kept]


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
    s_aux: Tensor | None = None,
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
        s_aux: ``[H]``, transformers' name for the sinks of ``attend_packed``.

    Returns:
        ``[1, T, H, D]`` and None.
    """
    step_kv = torch.stack([key[0], value[0]], dim=1).permute(2, 1, 0, 3)  # [T, 2, G, D]
    layer_idx: int = module.layer_idx  # type: ignore[assignment]
    attended = attend_packed(query[0].transpose(0, 1), step_kv, step, layer_idx, scaling, s_aux)
    return attended[None], None


AttentionInterface.register(GATHERED, gathered_attention)
