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


class AttentionShape(NamedTuple):
    """What of a model decides over its pool."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


def attended_pool(
    spec: EngineSpec,
    shape: AttentionShape,
    num_pages: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[PagedPool, AttentionForm | None]:
    """Make a pool with the fastest form of attention over it; None: row by row, which needs nothing."""
    context = choose_context_attention(device, dtype, *shape[1:], spec.page_size)
    layout = PoolLayout.BY_HEAD if context is None else PoolLayout.BY_PAGE
    pool = PagedPool(
        shape.num_layers,
        num_pages,
        spec.page_size,
        shape.num_kv_heads,
        shape.head_dim,
        dtype,
        device,
        layout,
    )
    if context is not None or spec.kernel_folder is None:
        return pool, context
    heads_per_kv = shape.num_heads // shape.num_kv_heads
    return pool, row_kernel(pool, heads_per_kv, Path(spec.kernel_folder))
