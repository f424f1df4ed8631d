"""Ingest and draft passes over memory that never moves; see ``dflash_ops.static_rows``.

Rows that need more take the way of ``DrafterEngine``: trees, biases, candidates that are left out, rejection.

Shape letters: R rows, W tokens of a draft block, N positions to ingest, K tapped layers, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

from torch import Tensor

from dflash_ops.context_attention import ContextAttention
from dflash_ops.graphs import StaticPasses
from dflash_ops.paging import PagedPool
from dflash_ops.sampling import choose_plainly
from dflash_ops.static_rows import (
    Bucket,
    BucketSizes,
    StaticRow,
    StaticRows,
    has_plain_sampling,
)
from dflash_ops.static_table import StaticTable
from dflash_wire.records import Ingest, Row
from drafter.drafter import Draft
from drafter.features import FeatureReader
from drafter.network import DraftNetwork

SMALLEST_INGEST = 16
LARGEST_INGEST = 1024


def why_not_static(network: DraftNetwork) -> str | None:
    """Why a draft model's passes cannot be over static memory; None if they can."""
    settings = network.model.settings
    if settings.selector is not None or settings.convolution is not None:
        return "DFlash 2 chooses slot by slot"
    if any(reach.window is not None for reach in settings.reaches):
        return "it has layers with a sliding window"
    if len(set(settings.reaches)) > 1:
        return "its layers do not all see the same"
    return None


class StaticDrafter:
    """Passes of one draft model, by bucket. Owner: ``DrafterEngine``, whose pool it writes.

    Args:
        network: for which ``why_not_static`` has nothing to say.
        pool: its context pool, by page.
        feature_pool: of the only lane.
        reader: of its features.
        context_attention: of the engine.
        sizes: of the draft pass's buckets.
        limit_bytes: see ``StaticPasses``.
    """

    def __init__(
        self,
        network: DraftNetwork,
        pool: PagedPool,
        feature_pool: Tensor,
        reader: FeatureReader,
        context_attention: ContextAttention,
        sizes: BucketSizes,
        limit_bytes: int,
    ) -> None:
        self._network, self._pool, self._feature_pool = network, pool, feature_pool
        self._reader = reader
        self._context_attention = context_attention
        self._sizes = sizes
        self._inputs = cache(partial(StaticRows, device=pool.device))  # by bucket
        self._ingests: dict[int, StaticTable] = {}
        self.passes = StaticPasses("draft", pool.device, limit_bytes)
        self._is_causal = network.model.settings.reaches[0].is_causal
        network.reserve_positions(sizes.num_positions(pool.page_size))

    def ingest(self, ingests: Sequence[Ingest]) -> bool:
        """Project features and store keys and values; does not wait for the device.

        Returns:
            whether it was done; not when it is nothing, or more than a pass takes.
        """
        entries: list[tuple[int, int, int]] = []
        size = self._pool.page_size
        for i in ingests:
            for n in range(i.num_tokens):
                position = i.start_position + n
                slot = i.page_ids[position // size] * size + position % size
                entries.append((i.feature_offset + n * i.stride, position, slot))
        if not 0 < len(entries) <= LARGEST_INGEST:
            return False
        count = max(SMALLEST_INGEST, 1 << (len(entries) - 1).bit_length())
        table = self._ingests.get(count)
        if table is None:
            table = self._ingests[count] = StaticTable(3, count, self._pool.device)
        values = table.values()
        values[:] = [[first] for first in entries[0]]  # what is filled up repeats the first one
        values[:, : len(entries)] = list(zip(*entries, strict=True))
        table.send()
        self.passes.run(("ingest", count), lambda: lambda: self._ingest_pass(table.on_device))
        return True

    def _ingest_pass(self, inputs: Tensor) -> Tensor:
        """What is captured of an ingest: FeaturePool row, position and slot of each of N ``[3, N]``."""
        rows, positions, slots = inputs
        features = self._reader.picked(self._feature_pool[rows])
        self._pool.write(slots, self._network.context_kv(features, positions))
        return inputs

    def bucket_of(self, rows: Sequence[Row]) -> Bucket | None:
        """The bucket that rows fit; None when they need more than this pass does."""
        if not all(_is_plain(row) for row in rows):
            return None
        pages = max(-(-row.start_position // self._pool.page_size) for row in rows)
        samples = any(row.sampling.temperature > 0 for row in rows)
        return self._sizes.smallest([row.drafted_width for row in rows], pages, samples)

    def run(self, rows: Sequence[Row], bucket: Bucket) -> list[Draft]:
        """Draft for rows; waits for the device once, at the end."""
        found: list[list[int]] = self.launch(rows, bucket)[: len(rows)].tolist()
        return [mine[: row.width - 1] for mine, row in zip(found, rows, strict=True)]

    def launch(self, rows: Sequence[Row], bucket: Bucket) -> Tensor:
        """Give the device a draft pass; does not wait for it.

        Returns:
            ``[R, W - 1]`` int64 draft tokens; valid until the next pass.
        """
        inputs = self._inputs(bucket)
        inputs.fill([self._row(row, bucket.pages) for row in rows])
        return self.passes.run(bucket, lambda: lambda: self._draft_pass(inputs))

    def _row(self, row: Row, num_pages: int) -> StaticRow:
        width = row.drafted_width
        mask = self._network.model.mask_token_id
        return StaticRow(
            row.token_ids + [mask] * (width - 1),
            row.start_position,
            row.page_ids[:num_pages],
            width,
            None if self._is_causal else [(1 << width) - 1] * width,
            sampling=row.sampling,
        )

    def _draft_pass(self, inputs: StaticRows) -> Tensor:
        """What is captured: see ``launch``."""
        network = self._network
        rows, width, _, samples = inputs.bucket
        step = inputs.attention(self._pool, network.heads_per_kv, self._context_attention)
        positions = inputs.positions
        hidden = network.hidden(inputs["token_ids"].flatten(), positions.flatten(), step)
        slots = hidden.view(rows, width, -1)[:, 1:].flatten(0, 1)
        count = width - 1
        drafts = choose_plainly(
            network.logits(slots),
            inputs.temperatures(count),
            inputs.seeds(count),
            positions[:, 1:].flatten(),
            samples,
        )
        return drafts.view(rows, count)


def _is_plain(row: Row) -> bool:
    has_bias = row.extras is not None and row.extras.draft_bias is not None
    return not row.is_tree and not has_bias and has_plain_sampling(row.sampling)
