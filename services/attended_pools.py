"""Pools, and what attends over them: chosen by the device, the type and the sizes of heads."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from dflash_ops.attention import AttentionForm
from dflash_ops.compiled_attention import row_kernel
from dflash_ops.context_attention import choose_context_attention
from dflash_ops.paging import PagedPool, PoolLayout
from services.spec import EngineSpec


class PoolShape(NamedTuple):
    """What of a model decides over its pool."""

    num_layers: int
    num_pages: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


def attended_pool(
    spec: EngineSpec, shape: PoolShape, *, is_plain: bool
) -> tuple[PagedPool, AttentionForm | None]:
    """Make a pool with the fastest form of attention over it; None: row by row, which needs nothing.

    Args:
        spec: of the engine.
        shape: of the model that attends.
        is_plain: whether in all its layers a query sees what rows say, and nothing besides.
    """
    heads = shape.num_heads, shape.num_kv_heads, shape.head_dim
    context = choose_context_attention(shape.device, shape.dtype, *heads, spec.page_size)
    if context is not None:
        return plain_pool(spec, shape, PoolLayout.BY_PAGE), context
    pool = plain_pool(spec, shape)
    if spec.kernel_folder is None or not is_plain:
        return pool, None
    heads_per_kv = shape.num_heads // shape.num_kv_heads
    return pool, row_kernel(pool, heads_per_kv, Path(spec.kernel_folder))


def plain_pool(
    spec: EngineSpec, shape: PoolShape, layout: PoolLayout = PoolLayout.BY_HEAD
) -> PagedPool:
    """Make a pool; by head it is read row by row."""
    return PagedPool(
        shape.num_layers,
        shape.num_pages,
        spec.page_size,
        shape.num_kv_heads,
        shape.head_dim,
        shape.dtype,
        shape.device,
        layout,
    )
