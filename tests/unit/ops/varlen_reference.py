"""torch's variable-length attention in loops, for tests on machines whose torch has no kernel for it.

Two generations of its signature: without page tables (torch 2.11) and with them. Where the kernels are odd,
so is this: the log-sum-exp comes heads first, and is +inf for a sequence without keys.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class AuxRequest(NamedTuple):
    lse: bool = False


def first_varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor | tuple[Tensor, Tensor]:
    """The signature of torch 2.11."""
    assert cu_seq_k is not None and cu_seq_k.dtype == torch.int32
    bounds = cu_seq_k.tolist()
    assert bounds[-1] <= key.shape[0] and max_k >= max(b - a for a, b in pairwise(bounds))
    pairs = [(key[a:b], value[a:b]) for a, b in pairwise(bounds)]
    return _attend(query, pairs, cu_seq_q, max_q, scale, window_size, return_aux)


def paged_varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The signature with pages, for calls with a page table and for calls without."""
    assert enable_gqa or key.shape[-2] == query.shape[1]
    if block_table is None:
        return first_varlen_attn(
            query, key, value, cu_seq_q, cu_seq_k, max_q, max_k,
            return_aux=return_aux, scale=scale, window_size=window_size,
        )  # fmt: skip
    assert seqused_k is not None and cu_seq_k is None
    assert seqused_k.dtype == block_table.dtype == torch.int32
    pairs = []
    for pages, used in zip(block_table.tolist(), seqused_k.tolist(), strict=True):
        assert used <= max_k <= len(pages) * key.shape[1]
        pairs.append((key[pages].flatten(0, 1)[:used], value[pages].flatten(0, 1)[:used]))
    return _attend(query, pairs, cu_seq_q, max_q, scale, window_size, return_aux)


def _attend(
    query: Tensor,
    pairs: list[tuple[Tensor, Tensor]],
    cu_seq_q: Tensor,
    max_q: int,
    scale: float | None,
    window_size: tuple[int, int],
    return_aux: AuxRequest | None,
) -> Tensor | tuple[Tensor, Tensor]:
    assert cu_seq_q.dtype == torch.int32 and window_size == (-1, -1)
    num_heads = query.shape[1]
    out = torch.zeros_like(query)
    lse = torch.full((num_heads, query.shape[0]), float("inf"))
    starts = cu_seq_q.tolist()
    assert starts[-1] == query.shape[0]
    for row, (key, value) in enumerate(pairs):
        start, end = starts[row], starts[row + 1]
        assert end - start <= max_q
        for head in range(num_heads if key.shape[0] else 0):
            group = head * key.shape[1] // num_heads
            scores = query[start:end, head] @ key[:, group].T * (scale or query.shape[-1] ** -0.5)
            out[start:end, head] = scores.softmax(dim=-1) @ value[:, group]
            lse[head, start:end] = scores.logsumexp(dim=-1)
    return (out, lse) if return_aux is not None and return_aux.lse else out
