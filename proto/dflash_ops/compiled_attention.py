"""Attention of all rows of a pass in one call per layer, by a kernel that the system's C compiler builds.

``attention`` calls torch's fused operator once for every row and layer; from a few rows on these calls are
the largest part of a pass on a CPU. ``row_attention.c`` takes all rows at once, reads keys and values where
they lie, and gives a token the same bits however wide its row is. Where there is no compiler, or for models
that need more than it can do, nothing is lost but time.

Shape letters: T packed tokens, H query heads, G key/value heads, D head size, L layers.
"""

from __future__ import annotations

import ctypes
import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from dflash_ops.kernel_build import ROW_ATTENTION, load_library
from dflash_ops.paging import PagedPool, PoolLayout
from dflash_ops.visibility import AttentionRow, Visible
from dflash_wire.errors import FatalError

logger = logging.getLogger(__name__)

WHOLE_VECTOR = 16
"""Head sizes must be multiples of it."""
MOST_HEADS_PER_KV = 64
CAUSAL, ALL, TREE = range(3)


Kernel = Callable[..., None]


class _Pass(ctypes.Structure):
    """``pass_t`` of the source."""

    _fields_ = [
        ("rows", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("path_ends", ctypes.c_void_p),
        ("paths", ctypes.c_void_p),
        ("pool", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("heads_per_kv", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        ("num_slots", ctypes.c_int64),
    ]


@dataclass(frozen=True, slots=True)
class CompiledPlan:
    """The rows of one pass as the kernel reads them."""

    kernel: Kernel
    described: _Pass
    arrays: tuple[array[int], ...]
    """What ``described`` points to."""
    num_tokens: int
    """T."""

    def attend(self, query: Tensor, step_kv: Tensor, layer: int, scale: float) -> Tensor:
        """Attend in one layer.

        Args:
            query: ``[T, H, D]`` float32, rotated; tokens may lie apart.
            step_kv: ``[T, 2, G, D]`` of this step's own tokens.
            layer: selects the pool's layer.
            scale: softmax scale.

        Returns:
            ``[T, H, D]``.
        """
        assert query.dtype == step_kv.dtype == torch.float32
        assert len(query) == len(step_kv) == self.num_tokens
        if query.stride(1) != query.shape[2] or query.stride(2) != 1:
            query = query.contiguous()
        step_kv = step_kv.contiguous()
        out = query.new_empty(query.shape)
        self.kernel(
            ctypes.byref(self.described),
            layer,
            query.data_ptr(),
            query.stride(0),
            step_kv.data_ptr(),
            out.data_ptr(),
            scale,
        )
        return out


class RowKernel:
    """The compiled kernel, for one pool and the heads of its model.

    Args:
        function: ``attend`` of the library.
        pool: where the context is.
        heads_per_kv: H / G.
    """

    def __init__(self, function: Kernel, pool: PagedPool, heads_per_kv: int) -> None:
        self._function = function
        _, self._num_slots, _, self._num_kv_heads, _ = pool.data.shape
        self._page_size = pool.page_size
        self._heads_per_kv = heads_per_kv
        self._pool = pool
        self._address = pool.data.data_ptr()

    def plan(self, rows: Sequence[AttentionRow]) -> CompiledPlan | None:
        """Prepare a pass over ``rows``; None when it needs what the kernel does not do.

        Raises:
            FatalError: a row's context is not on its pages, or these are none of the pool's.
        """
        described, pages, paths, path_ends = array("q"), array("q"), array("q"), array("q", [0])
        for row in rows:
            if row.num_unread:
                return None
            kind = TREE
            first_path = len(path_ends) - 1
            if isinstance(row.visible, Tensor):
                # Parents stand before their children, so ascending order is the order along a path.
                token, seen = torch.nonzero(row.visible, as_tuple=True)
                before = len(paths)
                paths.extend(seen.tolist())
                ends = torch.bincount(token, minlength=row.width).cumsum(0) + before
                path_ends.extend(ends.tolist())
            else:
                kind = ALL if row.visible is Visible.ALL else CAUSAL
            described.extend((row.offset, row.width, row.context, len(pages), kind, first_path))
            num_pages = -(-row.context // self._page_size)
            if len(row.page_ids) < num_pages:
                raise FatalError(f"{len(row.page_ids)} pages for a context of {row.context}")
            pages.extend(row.page_ids[:num_pages])
        # C would not notice.
        if pages and not 0 <= min(pages) <= max(pages) < self._num_slots // self._page_size:
            raise FatalError(f"pages {min(pages)} to {max(pages)} are not all in the pool")
        arrays = (described, pages, path_ends, paths)
        addresses = [mine.buffer_info()[0] for mine in arrays]
        heads = self._heads_per_kv, self._num_kv_heads
        values = _Pass(
            *addresses, self._address, len(rows), *heads, self._page_size, self._num_slots
        )
        return CompiledPlan(self._function, values, arrays, sum(row.width for row in rows))


def row_kernel(pool: PagedPool, heads_per_kv: int, cache_folder: Path) -> RowKernel | None:
    """Return the kernel for a model's passes; None, with the reason logged, where there is none.

    Args:
        pool: where the context is.
        heads_per_kv: H / G.
        cache_folder: keeps what was compiled; made if it is not there.
    """
    head_dim = pool.data.shape[-1]
    is_by_head = pool.layout is PoolLayout.BY_HEAD
    if pool.device.type != "cpu" or pool.dtype != torch.float32 or not is_by_head:
        return None
    if head_dim % WHOLE_VECTOR or heads_per_kv > MOST_HEADS_PER_KV:
        logger.info("attention is not compiled for %d heads of %s", heads_per_kv, head_dim)
        return None
    function = _compiled(cache_folder, head_dim)
    return None if function is None else RowKernel(function, pool, heads_per_kv)


@cache
def _compiled(folder: Path, head_dim: int) -> Kernel | None:
    """Return ``attend`` of a library, which all pools of a process share."""
    library = load_library(ROW_ATTENTION, folder, {"DIM": head_dim})
    if library is None:
        return None
    try:
        function = library.attend
    except AttributeError as error:  # $CC's own options may hide what a library has
        logger.warning("attention is not compiled: %s", error)
        return None
    function.argtypes = [
        ctypes.POINTER(_Pass),
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_float,
    ]
    function.restype = None
    return function
