"""Widths by the number of rows alone: the baseline, and the safe mode when predictions go wrong."""

from __future__ import annotations

from collections.abc import Sequence

DEFAULT_TABLE = ((4, 16), (16, 8), (48, 4))
"""Most rows and their width; more rows decode plainly."""


class WidthTable:
    """Maps numbers of rows to one width; immutable.

    Args:
        entries: ``(most rows, width)`` in ascending order of rows; beyond the last entry the width is 1.
        max_width: the drafter's block.

    Raises:
        ValueError: the entries do not ascend, or a width is below 1.
    """

    def __init__(
        self, entries: Sequence[tuple[int, int]] = DEFAULT_TABLE, max_width: int = 16
    ) -> None:
        bounds = [rows for rows, _ in entries]
        if bounds != sorted(set(bounds)) or any(width < 1 for _, width in entries):
            raise ValueError("a width table has ascending numbers of rows and widths of at least 1")
        self._entries = [(rows, min(width, max_width)) for rows, width in entries]

    def width(self, num_rows: int) -> int:
        """The width of every row."""
        return next((width for rows, width in self._entries if num_rows <= rows), 1)
