"""Block-sparse attention of training: each draft block sees its own context and itself, nothing else.

Registered with transformers as ``dflash_training``. Draft blocks become the batch dimension, so the
sparse mask costs nothing: a block attends to ``S + B`` keys, never to another block.

Shape letters: M draft blocks, B draft block size, R sequences, S context tokens, L draft layers,
Q query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

ATTENTION_NAME = "dflash_training"


@dataclass(frozen=True)
class BlockContext:
    """What the attention function needs to know about the draft blocks of one pass.

    Attributes:
        keys_values: ``[L, 2, R, G, S, D]``; index 0 of dim 1 is the rotated key.
        block_rows: ``[M]`` int64, the sequence of each draft block.
        visible: ``[M, 1, 1, S + B]`` bool, which keys a block sees.
    """

    keys_values: Tensor
    block_rows: Tensor
    visible: Tensor


def visible_keys(
    anchors: Tensor, num_context: int, draft_block_size: int, sizes: Tensor | None = None
) -> Tensor:
    """Return ``[M, 1, 1, S + B]``: context strictly before the anchor, then the own block.

    Args:
        anchors: ``[M]`` int64 positions.
        num_context: S.
        draft_block_size: B.
        sizes: ``[M]`` int64 where blocks are narrower than B; what is behind a block's size is hidden.
    """
    before = torch.arange(num_context, device=anchors.device) < anchors[:, None]  # [M, S]
    if sizes is None:
        return functional.pad(before, (0, draft_block_size), value=True)[:, None, None, :]
    own = torch.arange(draft_block_size, device=anchors.device) < sizes[:, None]  # [M, B]
    return torch.cat([before, own], dim=1)[:, None, None, :]


def make_block_context(
    keys_values: Tensor,
    num_rows: int,
    block_rows: Tensor,
    anchors: Tensor,
    draft_block_size: int,
    sizes: Tensor | None = None,
) -> BlockContext:
    """Arrange the output of ``DraftModel.context_kv`` for the attention function.

    Args:
        keys_values: ``[L, R*S, 2, G, D]``.
        num_rows: R.
        block_rows: ``[M]``.
        anchors: ``[M]``.
        draft_block_size: B.
        sizes: ``[M]`` as for ``visible_keys``.
    """
    shaped = keys_values.unflatten(1, (num_rows, -1))  # [L, R, S, 2, G, D]
    arranged = shaped.permute(0, 3, 1, 4, 2, 5).contiguous()  # [L, 2, R, G, S, D]
    visible = visible_keys(anchors, arranged.shape[4], draft_block_size, sizes)
    return BlockContext(arranged, block_rows, visible)


def block_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    block_context: BlockContext,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend from M draft blocks laid end to end.

    Args:
        module: the attention layer; its ``layer_idx`` selects the context keys and values.
        query: ``[1, Q, M*B, D]``.
        key: ``[1, G, M*B, D]`` of the blocks themselves; ``value`` alike.
        attention_mask: unused; ``block_context.visible`` says who sees what.
        block_context: see ``BlockContext``.
        scaling: softmax scale.

    Returns:
        ``[1, M*B, Q, D]`` and None.
    """
    num_blocks = block_context.block_rows.shape[0]
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    layer_idx = module.layer_idx
    assert isinstance(layer_idx, int)
    context = block_context.keys_values[layer_idx]  # [2, R, G, S, D]
    dtype = value.dtype
    chosen = context.to(dtype).index_select(1, block_context.block_rows)  # [2, M, G, S, D]
    own_key = key[0].to(dtype).unflatten(1, (num_blocks, -1)).transpose(0, 1)  # [M, G, B, D]
    own_value = value[0].unflatten(1, (num_blocks, -1)).transpose(0, 1)
    keys = torch.cat([chosen[0], own_key], dim=2)  # [M, G, S+B, D]
    values = torch.cat([chosen[1], own_value], dim=2)
    # All queries of a block see the same keys, so the heads that share a key head become more rows.
    grouped = query[0].to(dtype).unflatten(0, (num_kv_heads, -1)).unflatten(2, (num_blocks, -1))
    queries = grouped.permute(2, 0, 1, 3, 4).flatten(2, 3)  # [M, G, Q/G*B, D]
    mixed = _attend(queries, keys, values, block_context.visible, scaling)
    mixed = mixed.unflatten(2, (num_heads // num_kv_heads, -1))  # [M, G, Q/G, B, D]
    return mixed.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)[None], None


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scaling: float | None
) -> Tensor:
    """Masked softmax attention over ``[M, G, *, D]``."""
    if queries.dtype != torch.bfloat16 or queries.device.type != "cpu":
        return functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=visible, scale=scaling
        )
    # Forward and backward of these small products take half the time of the fused CPU kernel.
    scale = queries.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.matmul(queries * scale, keys.transpose(-1, -2))  # [M, G, Q/G*B, S+B]
    hidden_keys = torch.zeros_like(visible, dtype=scores.dtype).masked_fill(~visible, -torch.inf)
    return torch.matmul((scores + hidden_keys).softmax(-1).to(values.dtype), values)


AttentionInterface.register(ATTENTION_NAME, block_attention)
