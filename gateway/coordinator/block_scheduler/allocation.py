"""Which draft tokens are worth verifying: expected committed tokens per second, over all sizes of a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from gateway.coordinator.block_scheduler.records import FloatArray, IntArray

MOST_SIZES = 48
"""Sizes that are priced where the engine runs any."""
FIRST = np.float32(2.0)
"""Above every probability: what a draft token that a row gets in any case is ordered by, and more."""


class Option(NamedTuple):
    """The best step with one draft width."""

    draft_width: int
    num_positions: int
    """Verified of the rows to decide on, anchors included."""
    tokens: float
    """Expected committed tokens of these rows."""
    step_ms: float

    @property
    def tokens_per_ms(self) -> float:
        """What is maximised."""
        return self.tokens / self.step_ms


@lru_cache(maxsize=1024)
def candidate_sizes(
    num_rows: int, most: int, captured_sizes: tuple[int, ...] = (), fixed_positions: int = 0
) -> IntArray:
    """Return the sizes worth pricing: positions of the rows to decide on, ascending, ``num_rows`` first.

    Captured sizes hold the fixed rows' positions too. Where the engine runs any size, prices are linear
    between swept widths, so a few dozen evenly spaced sizes miss next to nothing. Read-only.
    """
    if captured_sizes:
        fitting = [size - fixed_positions for size in captured_sizes]
        inside = [size for size in fitting if num_rows < size < most]
        sizes = np.array(sorted({num_rows, *inside, most}), dtype=np.int64)
    else:
        count = min(MOST_SIZES, most - num_rows + 1)
        sizes = np.unique(np.linspace(num_rows, most, count).astype(np.int64))
    sizes.flags.writeable = False
    return sizes


class Drafts:
    """What the draft tokens of a step are worth, for every draft width at once; immutable.

    The draft tokens of all rows are taken in descending order of survival. Survival falls along a row, so
    whatever prefix of that order is taken, each row's share is a prefix of its draft.

    Args:
        draft_widths: ascending, 1 among them.
        survival: ``[draft widths, rows, positions]``, falling along each row.
        max_widths: ``[rows]``, or ``[draft widths, rows]``, at least 1.
        floors: ``[draft widths, rows]`` widths that rows get in any case, where their maximum allows.
        most_widths: by draft width, what is verified at most; a tree may be wider than its block.
    """

    def __init__(
        self,
        draft_widths: Sequence[int],
        survival: FloatArray,
        max_widths: IntArray,
        floors: IntArray | None = None,
        most_widths: Sequence[int] | None = None,
    ) -> None:
        self._draft_widths = list(draft_widths)
        num_widths, self._num_rows, self._num_positions = survival.shape
        position = np.arange(1, self._num_positions + 1)  # draft token k makes width k + 1
        allowed = np.minimum(max_widths, np.array(most_widths or self._draft_widths)[:, None])
        # Negative, so that the best come first. 16 digits would say no more, and take longer to sort.
        keys = np.where(position < allowed[:, :, None], -survival, 0.0).astype(np.float32)
        self._num_first = [0] * num_widths
        if floors is not None:
            is_first = position < np.minimum(floors, allowed)[:, :, None]
            keys -= FIRST * is_first
            self._num_first = is_first.sum(axis=(1, 2)).tolist()
        self._keys = keys.reshape(num_widths, -1)

    def options(self, sizes: IntArray, step_ms: FloatArray) -> dict[int, Option]:
        """Return the option with most expected committed tokens per millisecond, by draft width.

        Args:
            sizes: ``[sizes]`` total positions to choose among, ascending (see ``candidate_sizes``).
            step_ms: ``[draft widths, sizes]`` what a step takes.
        """
        num_drafts = sizes - self._num_rows
        tokens = np.full(step_ms.shape, float(self._num_rows))
        if len(sizes) > 1:
            ordered = np.sort(self._keys, axis=1)[:, : num_drafts[-1]]
            between = np.add.reduceat(ordered, num_drafts[:-1], axis=1, dtype=np.float64)
            tokens[:, 1:] -= np.cumsum(between, axis=1)
        for index, num_first in enumerate(self._num_first):
            if num_first:
                tokens[index] -= FIRST * np.minimum(num_drafts, num_first)
        values = tokens / step_ms
        if len(sizes) > 1:
            # Blocks of which nothing is verified are no option: plain decoding gives the same for less.
            values[np.array(self._draft_widths) > 1, 0] = -1.0
        for index, num_first in enumerate(self._num_first):
            # Whoever must have his floor gets it; the last size holds as many as may be.
            values[index, : min(np.searchsorted(num_drafts, num_first), len(sizes) - 1)] = -1.0
        best = values.argmax(axis=1).tolist()
        return {
            width: Option(
                width, int(sizes[at]), float(tokens[index, at]), float(step_ms[index, at])
            )
            for index, (width, at) in enumerate(zip(self._draft_widths, best, strict=True))
        }

    def widths(self, option: Option) -> IntArray:
        """Return ``[rows]`` verify widths of an option."""
        keys = self._keys[self._draft_widths.index(option.draft_width)]
        # Stable, and columns ascend within a row: of equal survivals the earlier position goes first.
        taken = np.argsort(keys, kind="stable")[: option.num_positions - self._num_rows]
        rows = taken[keys[taken] < 0.0] // max(1, self._num_positions)
        return 1 + np.bincount(rows, minlength=self._num_rows)


def floors_for(survival: FloatArray, step_ms: FloatArray, target_tpot_ms: float) -> IntArray:
    """Return ``[draft widths, rows]`` the least width that keeps a row's time per token within a target.

    1 where no width can: such a row would only cost the others theirs.

    Args:
        survival: ``[draft widths, rows, positions]``; what may not be taken is zero.
        step_ms: ``[draft widths]``.
        target_tpot_ms: for every row.
    """
    tokens = np.ones((*survival.shape[:2], survival.shape[2] + 1))  # by width
    tokens[:, :, 1:] += np.cumsum(survival, axis=2)
    meets = step_ms[:, None, None] / tokens <= target_tpot_ms
    return np.where(meets.any(axis=2), np.argmax(meets, axis=2) + 1, 1)
