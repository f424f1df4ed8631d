"""Which draft tokens are worth verifying: expected committed tokens per second, over all sizes of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gateway.coordinator.block_scheduler.records import FloatArray, IntArray

MOST_SIZES = 48
"""Sizes that are priced where the engine runs any."""

Price = Callable[[IntArray], FloatArray]
"""Positions of the rows to decide on, ``[n]`` -> milliseconds of the whole step, ``[n]``."""


class Allocation(NamedTuple):
    """The best widths for one draft width."""

    draft_width: int
    widths: IntArray
    """``[rows]`` verify widths."""
    tokens: float
    """Expected committed tokens of the rows."""
    step_ms: float

    @property
    def tokens_per_ms(self) -> float:
        """What is maximised."""
        return self.tokens / self.step_ms


def candidate_sizes(
    num_rows: int, most: int, captured_sizes: IntArray, fixed_positions: int = 0
) -> IntArray:
    """Return the sizes worth pricing: positions of the rows to decide on, ascending, ``num_rows`` first.

    Captured sizes hold the fixed rows' positions too. Where the engine runs any size, prices are linear
    between swept widths, so a few dozen evenly spaced sizes miss next to nothing.
    """
    if len(captured_sizes):
        fitting = captured_sizes - fixed_positions
        fitting = fitting[(fitting > num_rows) & (fitting < most)]
        return np.unique(np.concatenate([[num_rows], fitting, [most]]))
    count = min(MOST_SIZES, most - num_rows + 1)
    return np.unique(np.linspace(num_rows, most, count).astype(np.int64))


def allocate(
    draft_width: int,
    survival: FloatArray,
    max_widths: IntArray,
    sizes: IntArray,
    price: Price,
    floors: IntArray | None = None,
) -> Allocation:
    """Choose verify widths that maximise expected committed tokens per millisecond.

    The draft tokens of all rows are taken in descending order of survival. Survival falls along a row, so
    whatever prefix of that order is taken, each row's share is a prefix of its draft.

    Args:
        draft_width: 1 for plain decoding; then ``survival`` has no columns.
        survival: ``[rows, draft_width - 1]``, falling along each row.
        max_widths: ``[rows]``, at least 1.
        sizes: total positions to choose among, ascending (see ``candidate_sizes``).
        price: what a step of each size takes.
        floors: ``[rows]`` widths that rows get in any case, where their maximum allows.
    """
    num_rows = len(max_widths)
    allowed = np.minimum(max_widths, draft_width)
    position = np.arange(1, draft_width)
    gains = np.where(position < allowed[:, None], survival, -1.0)  # draft k makes width k + 1
    order_by = gains
    if floors is not None:
        order_by = np.where((position < floors[:, None]) & (gains >= 0), gains + 2.0, gains)
    # Stable, and columns ascend within a row: of equal gains the earlier position goes first.
    order = np.argsort(-order_by, axis=None, kind="stable")
    num_useful = int(np.sum(gains > 0))
    least = num_rows + (0 if floors is None else int(np.sum(order_by >= 2.0)))
    sizes = np.clip(sizes, min(least, num_rows + num_useful), num_rows + num_useful)
    expected = num_rows + np.concatenate([[0.0], np.cumsum(gains.ravel()[order[:num_useful]])])
    times = price(sizes)
    best = int(np.argmax(expected[sizes - num_rows] / times))
    taken = int(sizes[best]) - num_rows
    widths = 1 + np.bincount(order[:taken] // max(1, draft_width - 1), minlength=num_rows)
    return Allocation(draft_width, widths, float(expected[taken]), float(times[best]))


def floors_for(survival: FloatArray, step_ms: float, target_tpot_ms: float) -> IntArray:
    """Return ``[rows]`` the least width that keeps each row's time per token within a target.

    1 where no width can: such a row would only cost the others theirs.
    """
    tokens = 1 + np.concatenate(
        [np.zeros((len(survival), 1)), np.cumsum(survival, axis=1)], axis=1
    )  # [rows, draft_width]: by width
    meets = step_ms / tokens <= target_tpot_ms
    return np.where(meets.any(axis=1), np.argmax(meets, axis=1) + 1, 1)
