"""Passes over memory that never moves: the rows of a step as one table of integers.

A CUDA graph replays kernels on the addresses it was captured with, so what changes from step to step must be
written to the same place: here one matrix, a line per row, filled on the host and copied to the device at
once. Rows are filled up to a *bucket*: so many rows, of so many tokens, with so many pages of context. What
is filled up is seen by nobody and writes nothing.

Shape letters: R rows, W tokens of a row, P pages of a row, T = R * W packed tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash_ops.attention import StepAttention
from dflash_ops.attention_groups import AttentionGroup
from dflash_ops.context_attention import ContextAttention
from dflash_ops.packed_context import PackedContext
from dflash_ops.paging import PagedPool
from dflash_ops.static_table import StaticTable
from dflash_wire.sampling import GREEDY, SamplingParams

MOST_TOKENS = 64
"""Of a row: what a token sees of it is kept in the bits of one integer."""
MOST_FILLING = 64
"""Tokens that a pass may be filled up to however few there are."""
MOST_TIMES_FILLED = 1.5**2
"""Above that, to how many times its own tokens: as sizes of rows and widths are half as large again."""
SCALARS = ("start", "num_tokens", "feature_offset", "seed", "temperature")


class Bucket(NamedTuple):
    """Sizes that a pass is filled up to."""

    rows: int
    width: int
    pages: int
    samples: bool = False
    """Whether any row has a temperature: then noise is computed."""


@dataclass(frozen=True, slots=True)
class BucketSizes:
    """The sizes that there are, ascending."""

    rows: tuple[int, ...]
    widths: tuple[int, ...]
    pages: tuple[int, ...]
    most_tokens: int
    """Of a bucket, all its rows together."""

    def smallest(self, widths: Sequence[int], pages: int, samples: bool = False) -> Bucket | None:
        """The smallest bucket that holds a pass; None when none does, or it would be mostly filling.

        Args:
            widths: of the pass's rows.
            pages: of the longest one.
            samples: whether any row has a temperature.
        """
        row_size = _least(self.rows, len(widths))
        width_size = _least(self.widths, max(widths))
        page_size = _least(self.pages, pages)
        if row_size is None or width_size is None or page_size is None:
            return None
        tokens = row_size * width_size
        if tokens > min(self.most_tokens, max(MOST_FILLING, MOST_TIMES_FILLED * sum(widths))):
            return None
        return Bucket(row_size, width_size, page_size, samples)

    @property
    def num_buckets(self) -> int:
        """How many there are, greedy and sampling."""
        tokens = (rows * width for rows in self.rows for width in self.widths)
        return 2 * len(self.pages) * sum(count <= self.most_tokens for count in tokens)

    def num_positions(self, page_size: int) -> int:
        """How many there are before the end of the widest row behind the longest context."""
        return self.pages[-1] * page_size + self.widths[-1]


def _least(sizes: Sequence[int], wanted: int) -> int | None:
    return next((size for size in sizes if size >= wanted), None)


def bucket_sizes(
    max_rows: int, max_width: int, max_pages: int, most_tokens: int, pages_matter: bool
) -> BucketSizes:
    """Sizes of which each is at most half as large again as the one before, up to the limits.

    So there is a bucket for any rows of one width that are within the limits.

    Args:
        max_rows: rows of a step.
        max_width: tokens of a row; at most ``MOST_TOKENS``.
        max_pages: of the longest sequence.
        most_tokens: of all rows together.
        pages_matter: whether a pass over a larger table costs more; then sizes of it grow fourfold.
    """
    pages = {max_pages}
    size = 16
    while pages_matter and size < max_pages:
        pages.add(size)
        size *= 4
    return BucketSizes(_growing(max_rows), _growing(max_width), tuple(sorted(pages)), most_tokens)


def _growing(limit: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24 and so on, and the limit."""
    powers = [1 << i for i in range(limit.bit_length())]
    sizes = {*powers, *(power + power // 2 for power in powers), limit}
    return tuple(sorted(size for size in sizes if size <= limit))


@dataclass(slots=True)
class StaticRow:
    """One row as the host knows it; what is not given stays neutral."""

    token_ids: Sequence[int]
    """At most W; the device may write more behind them."""
    start: int
    """Position of its first token, and tokens of its context."""
    page_ids: Sequence[int]
    num_tokens: int
    seen: Sequence[int] | None = None
    """Bit k of the i-th: token i sees token k. None: every token sees those up to it."""
    parents: Sequence[int] | None = None
    """Of every token but the first, the one it follows. None: the one before it."""
    depths: Sequence[int] | None = None
    """How far each is behind the first. None: 0, 1, 2 and so on."""
    feature_offset: int = 0
    sampling: SamplingParams = GREEDY


def seen_by_tree(parents: Sequence[int]) -> list[int]:
    """``StaticRow.seen`` of a tree: a token sees itself and the tokens it follows."""
    seen = [1]
    for child, parent in enumerate(parents):
        seen.append(seen[parent] | 1 << (child + 1))
    return seen


def has_plain_sampling(params: SamplingParams) -> bool:
    """Whether a token is the largest of logits and noise alone: no candidates are left out first."""
    is_whole = params.top_k == 0 and params.top_p >= 1.0 and params.min_p == 0.0
    return params.temperature <= 0 or (is_whole and not params.rejects)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >= 1 << 63 else bits


class StaticRows:
    """The inputs of one bucket. Owner: whoever runs its passes; ``fill`` writes, passes read.

    Every field is a view of the same matrix on the device, so a captured pass finds it again. Tokens behind a
    row's own see themselves alone and are seen by none; rows behind the last have no context either.
    """

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        self.bucket = bucket
        rows, width, pages, _ = bucket
        sizes = {"token_ids": width, "depths": width, "parents": width, "seen": width}
        sizes |= {"page_table": pages, **dict.fromkeys(SCALARS, 1)}
        self._columns: dict[str, slice] = {}
        end = 0
        for name, size in sizes.items():
            self._columns[name] = slice(end, end + size)
            end += size
        self._table = StaticTable(rows, end, device)
        self._alone = [_signed(1 << place) for place in range(width)]
        self._causal = [_signed((2 << place) - 1) for place in range(width)]

    def fill(self, rows: Sequence[StaticRow]) -> None:
        """Write a step's rows."""
        table, columns, width = self._table.values(), self._columns, self.bucket.width
        table[:] = 0
        places = range(width)
        table[:, columns["depths"]] = places
        table[:, columns["parents"]] = [0, *places[:-1]]
        table[:, columns["seen"]] = self._alone
        for line, row in zip(table, rows, strict=False):
            count = row.num_tokens
            _write(line[columns["token_ids"]], row.token_ids)
            _write(line[columns["page_table"]], row.page_ids)
            if row.depths is not None:
                _write(line[columns["depths"]], row.depths)
            if row.parents is not None:
                _write(line[columns["parents"]][1:], row.parents)
            seen = self._causal[:count] if row.seen is None else [_signed(s) for s in row.seen]
            _write(line[columns["seen"]], seen)
            params = row.sampling
            (temperature,) = struct.unpack("<q", struct.pack("<d", params.temperature))
            scalars = (row.start, count, row.feature_offset, params.seed, temperature)
            for name, value in zip(SCALARS, scalars, strict=True):
                line[columns[name]] = value
        self._table.send()

    def __getitem__(self, name: str) -> Tensor:
        """A field on the device: ``[R, W]``, the page table ``[R, P]``, scalars ``[R]``; int64."""
        found = self._table.on_device[:, self._columns[name]]
        return found[:, 0] if name in SCALARS else found

    def temperatures(self, count: int) -> Tensor:
        """``[R * count]`` float32: each row's, ``count`` times."""
        return self._repeated(self["temperature"].view(torch.float64).float(), count)

    def seeds(self, count: int) -> Tensor:
        """``[R * count]`` int64: each row's, ``count`` times."""
        return self._repeated(self["seed"], count)

    def _repeated(self, values: Tensor, count: int) -> Tensor:
        return values[:, None].expand(-1, count).flatten()

    @property
    def positions(self) -> Tensor:
        """``[R, W]`` int64: of every token."""
        return self["start"][:, None] + self["depths"]

    @property
    def visible(self) -> Tensor:
        """``[R, W, W]`` bool (query, key)."""
        keys = torch.arange(self.bucket.width, device=self._table.on_device.device)
        return (self["seen"][..., None] >> keys & 1).bool()

    def slots(self, page_size: int) -> Tensor:
        """``[R, W]`` int64: where each token's position lies in the pools; as far as the row has pages."""
        positions = self.positions
        index = (positions // page_size).clamp(max=self.bucket.pages - 1)
        return self["page_table"].gather(1, index) * page_size + positions % page_size

    def attention(
        self, pool: PagedPool, heads_per_kv: int, context_attention: ContextAttention
    ) -> StepAttention:
        """The metadata of a pass over all ``[R * W]`` tokens; part of what is captured."""
        rows, width = self.bucket.rows, self.bucket.width
        device = self._table.on_device.device
        mask = torch.zeros(rows, width, width, dtype=pool.dtype, device=device)
        mask = mask.masked_fill_(~self.visible, float("-inf")).repeat(1, heads_per_kv, 1)[:, None]
        everything = slice(0, rows * width)
        group = AttentionGroup(
            rows, width, [], [], mask, everything, None, everything, is_apart=True
        )
        context = PackedContext(
            pool,
            torch.arange(0, rows * width + 1, width, dtype=torch.int32, device=device),
            width,
            self["page_table"].int(),
            self["start"].int(),
        )
        return StepAttention([group], context=context, context_attention=context_attention)


def _write(line: Any, values: Sequence[int]) -> None:
    line[: len(values)] = values
