"""What the block scheduler was asked and what it chose, to be given again while nothing has changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gateway.coordinator.block_scheduler.allocation import Option
from gateway.coordinator.block_scheduler.records import IntArray, RowState, StepLoad, TreeShare


class Asked(NamedTuple):
    """What was asked for in the latest step."""

    rows: Sequence[RowState]
    load: StepLoad


class Choice(NamedTuple):
    """Widths that may be given to the same rows again, until a step."""

    asked: Asked
    option: Option
    widths: IntArray
    state: str
    reason: str
    until: int
    tree: TreeShare | None = None
    price: float = 0.0
    """Of a probe of all rows."""

    def fits(self, asked: Asked, step: int) -> bool:
        """Whether it may be given in a step: not too old, for these rows, none of them too wide."""
        before = self.asked
        return (
            step <= self.until
            and before.load._replace(fixed_context=0) == asked.load._replace(fixed_context=0)
            and len(before.rows) == len(asked.rows)
            and all(a.seq_id == b.seq_id for a, b in zip(before.rows, asked.rows, strict=True))
            and all(map(self._is_fit, self.widths.tolist(), asked.rows))
        )

    def _is_fit(self, width: int, row: RowState) -> bool:
        # What remains limits how deep a tree is, and not how wide.
        return width <= row.max_width or (self.tree is not None and row.max_width > 1)
