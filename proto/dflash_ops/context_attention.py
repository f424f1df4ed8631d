"""Attention over a pass's committed context: three forms of one function, and how one is chosen.

``PagedKernel`` is torch's variable-length attention with a page table; ``GatheredKernel`` the same without
one, on a copy of the context (torch 2.11 has no table there, and kernels take pages of certain sizes only);
``PlainContext`` basic operators, for every device and as the reference. Each returns the logarithm of the sum
of exponentials too, so the step's own tokens can be merged in.

What torch offers depends on its version, the card, the type and the sizes, so a form is chosen by trying it:
once, at start, against the reference.

Shape letters: T packed queries, R rows, C a row's context, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash_ops.packed_context import PackedContext
from dflash_ops.paging import PagedPool, PoolLayout

logger = logging.getLogger(__name__)

PAGED_ARGUMENTS = frozenset({"block_table", "seqused_k"})
TOLERANCE = 2.0**-6
"""Of a trial in 16 bits; outputs are about 1 there."""


class ContextAttention(Protocol):
    """Attends packed queries over their rows' context. Stateless, and waits for nothing.

    Attributes:
        name: for logs.
    """

    name: str

    def __call__(
        self, query: Tensor, layer_idx: int, context: PackedContext, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attend in one layer.

        Args:
            query: ``[T, H, D]``, rotated.
            layer_idx: of the pool.
            context: of the pass.
            scale: softmax scale.

        Returns:
            output ``[T, H, D]``, finite, and log-sum-exp ``[T, H]`` float32, -inf for who has no context.
        """


class PlainContext:
    """Basic operators of fixed shapes; rows are filled up to the widest."""

    name = "plain operators on gathered pages"

    def __call__(
        self, query: Tensor, layer_idx: int, context: PackedContext, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See ``ContextAttention``."""
        num_queries, num_heads, head_dim = query.shape
        width = context.most_queries
        slots = context.slots()  # [R, C]
        key, value = (
            part.flatten(0, 1)[slots].transpose(1, 2) for part in context.pool.pages(layer_idx)
        )  # [R, G, C, D]
        num_rows, num_kv_heads = key.shape[:2]
        starts = context.starts.long()
        places = starts[:-1, None] + torch.arange(width, device=query.device)
        filled = query[places.clamp_(max=num_queries - 1)]  # [R, W, H, D]
        folded = (
            filled.view(num_rows, width, num_kv_heads, -1, head_dim)
            .permute(0, 2, 3, 1, 4)
            .reshape(num_rows, num_kv_heads, -1, head_dim)
        )
        is_behind = torch.arange(slots.shape[1], device=query.device) >= context.lengths[:, None]
        # What lies behind a context weighs nothing, but nothing times NaN is NaN.
        value = value.masked_fill(is_behind[:, None, :, None], 0.0)
        scores = torch.matmul(folded, key.transpose(-1, -2)).float() * scale  # [R, G, Q, C]
        scores = scores.masked_fill(is_behind[:, None, None], float("-inf"))
        weight = scores.logsumexp(dim=-1)
        # Of a row without context all scores are -inf; from a finite number they stay so.
        least = weight.clamp(min=torch.finfo(torch.float32).min)
        shares = (scores - least[..., None]).exp().to(value.dtype)
        out = torch.matmul(shares, value).view(num_rows, num_heads, width, head_dim)
        rows = context.rows(num_queries)
        inside = torch.arange(num_queries, device=query.device) - starts[rows]
        weight = weight.view(num_rows, num_heads, width)
        return out[rows, :, inside], weight[rows, :, inside]


@dataclass(frozen=True, slots=True)
class VarlenCall:
    """torch's variable-length attention as far as this torch has it."""

    function: Callable[..., Any]
    request: Any
    """What asks for the log-sum-exp."""
    arguments: frozenset[str]

    @property
    def has_pages(self) -> bool:
        """Whether it takes a page table."""
        return self.arguments >= PAGED_ARGUMENTS

    def __call__(self, query: Tensor, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """Call it with grouped heads; log-sum-exp as ``[T, H]``."""
        if "enable_gqa" in self.arguments:
            named["enable_gqa"] = True
        out, weight = self.function(query, *arguments, return_aux=self.request, **named)
        # The documentation says [T, H], but heads come first; a torch that changes that fails the trial.
        return out, weight.transpose(0, 1)


def varlen_call() -> VarlenCall | None:
    """What this torch has; None when it has none."""
    try:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn
    except ImportError:
        return None
    arguments = frozenset(inspect.signature(varlen_attn).parameters)
    return VarlenCall(varlen_attn, AuxRequest(lse=True), arguments)


def _without_empty(weight: Tensor, context: PackedContext) -> Tensor:
    """Kernels differ in what they say of rows without context."""
    lengths = context.lengths[context.rows(weight.shape[0])]
    return weight.float().masked_fill((lengths == 0)[:, None], float("-inf"))


class PagedKernel:
    """The kernel reads pages in place."""

    name = "variable-length kernel with a page table"

    def __init__(self, call: VarlenCall) -> None:
        self._call = call

    def __call__(
        self, query: Tensor, layer_idx: int, context: PackedContext, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See ``ContextAttention``."""
        out, weight = self._call(
            query,
            *context.pool.pages(layer_idx),
            context.starts,
            None,
            context.most_queries,
            context.capacity,
            scale=scale,
            seqused_k=context.lengths,
            block_table=context.page_table,
        )
        return out, _without_empty(weight, context)


class GatheredKernel:
    """The kernel reads a copy of the context, made layer by layer: three times the memory traffic of it."""

    name = "variable-length kernel on gathered pages"

    def __init__(self, call: VarlenCall) -> None:
        self._call = call

    def __call__(
        self, query: Tensor, layer_idx: int, context: PackedContext, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See ``ContextAttention``."""
        slots, bounds = context.gathered()
        key, value = (
            part.flatten(0, 1).index_select(0, slots) for part in context.pool.pages(layer_idx)
        )
        queries, most = context.most_queries, context.capacity
        out, weight = self._call(
            query, key, value, context.starts, bounds, queries, most, scale=scale
        )
        return out, _without_empty(weight, context)


def choose_context_attention(
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
) -> ContextAttention | None:
    """Choose what attends contexts on a GPU, by trying; says in the log which, and why not a faster one.

    It reads a pool that lies by page, and leaves the rows' own tokens to ``dflash_ops.attention``.

    Returns:
        None on a CPU: there a ``RowKernel`` attends context and own tokens together
        (``dflash_ops.compiled_attention``), or ``dflash_ops.attention`` reads contexts row by row.
    """
    if device.type == "cpu":
        return None
    call = varlen_call()
    candidates: list[ContextAttention] = []
    if call is None:
        logger.info("torch %s has no variable-length attention", torch.__version__)
    else:
        if call.has_pages:
            candidates.append(PagedKernel(call))
        else:
            logger.info("torch %s: variable-length attention has no pages", torch.__version__)
        candidates.append(GatheredKernel(call))
    for candidate in candidates:
        reason = why_not(candidate, device, dtype, num_heads, num_kv_heads, head_dim, page_size)
        if reason is None:
            logger.info("attention over context: %s", candidate.name)
            return candidate
        logger.warning("attention over context: no %s: %s", candidate.name, reason)
    plain = PlainContext()
    logger.warning("attention over context: %s; slow where contexts are long", plain.name)
    return plain


@torch.inference_mode()
def why_not(
    candidate: ContextAttention,
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
) -> str | None:
    """Try a form on three rows, one of them without context; None when it agrees with the reference."""
    generator = torch.Generator().manual_seed(0)
    pool = PagedPool(
        1, 6, page_size, num_kv_heads, head_dim, dtype, device, layout=PoolLayout.BY_PAGE
    )
    pool.data.copy_(torch.randn(pool.data.shape, generator=generator))
    num_queries = 6 if num_heads != 6 else 7  # so that no shape is mistaken for its transpose
    starts, lengths = [0, 1, 4, num_queries], [page_size + 1, 0, 2 * page_size]
    context = PackedContext(
        pool,
        torch.tensor(starts, dtype=torch.int32, device=device),
        3,
        torch.tensor([[4, 1], [0, 0], [5, 2]], dtype=torch.int32, device=device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
    )
    query = torch.randn(num_queries, num_heads, head_dim, generator=generator)
    query = query.to(device=device, dtype=dtype)
    scale = head_dim**-0.5
    try:
        found = candidate(query, 0, context, scale)
        expected = PlainContext()(query, 0, context, scale)
        for name, mine, right in zip(("output", "log-sum-exp"), found, expected, strict=True):
            if mine.shape != right.shape or not torch.allclose(
                mine.float(), right.float(), atol=TOLERANCE, rtol=TOLERANCE
            ):
                return f"its {name} differs from the reference"
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None
