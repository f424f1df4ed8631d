"""One step's draft widths, weighed against each other and fitted to what its rows may still take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gateway.coordinator.block_scheduler.allocation import Drafts, Option, floors_for
from gateway.coordinator.block_scheduler.records import TREES, FloatArray, IntArray


class Weighing:
    """The best step of every draft width; immutable.

    ``options`` are what rows with many tokens to come would get: that a row is near its end says nothing of
    the width that the next steps should have. ``fitted`` is what these rows get.

    Args:
        draft_widths: ascending, 1 among them; those beyond ``TREES`` stand for trees, which may be wider than
            their blocks.
        survival: ``[draft widths, rows, positions]``.
        max_widths: ``[rows]`` what each row may take.
        sizes: ``[sizes]`` (see ``candidate_sizes``).
        step_ms: ``[draft widths, sizes]``.
        target_tpot_ms: time per output token that every row should meet if any width makes it.
    """

    def __init__(
        self,
        draft_widths: Sequence[int],
        survival: FloatArray,
        max_widths: IntArray,
        sizes: IntArray,
        step_ms: FloatArray,
        target_tpot_ms: float | None,
    ) -> None:
        self._draft_widths = list(draft_widths)
        self._survival, self._max_widths = survival, max_widths
        self._sizes, self._step_ms = sizes, step_ms
        self._floors: IntArray | None = None
        most_nodes = survival.shape[2]
        self._most_widths = [w if w < TREES else 1 + most_nodes for w in self._draft_widths]
        # What remains limits how deep a tree is, and not how wide.
        self._limits = np.stack(
            [
                self._max_widths if w < TREES else np.where(self._max_widths > 1, most, 1)
                for w, most in zip(self._draft_widths, self._most_widths, strict=True)
            ]
        )
        self._drafts, self.options = self._best()
        if target_tpot_ms is not None:
            position = np.arange(1, survival.shape[2] + 1)
            own = survival * (position < np.array(self._most_widths)[:, None, None])
            for _ in range(2):
                times = np.array([option.step_ms for option in self.options.values()])
                self._floors = floors_for(own, times, target_tpot_ms)
                self._drafts, self.options = self._best()

    def _best(self) -> tuple[Drafts, dict[int, Option]]:
        endless = np.full(len(self._max_widths), max(self._most_widths))
        drafts = Drafts(
            self._draft_widths, self._survival, endless, self._floors, self._most_widths
        )
        return drafts, drafts.options(self._sizes, self._step_ms)

    def prices(self, draft_width: int) -> tuple[IntArray, FloatArray]:
        """Return the sizes ``[sizes]`` and what a draft width's steps of those sizes take."""
        return self._sizes, self._step_ms[self._draft_widths.index(draft_width)]

    def fitted(self, draft_width: int) -> tuple[Option, IntArray]:
        """Return the best step of a draft width that these rows may have, and their verify widths."""
        at = self._draft_widths.index(draft_width)
        if int(self._limits[at].min()) >= self._most_widths[at]:
            option = self.options[draft_width]
            return option, self._drafts.widths(option)
        mine = slice(at, at + 1)
        floors = None if self._floors is None else self._floors[mine]
        drafts = Drafts(
            [draft_width], self._survival[mine], self._limits[mine], floors, self._most_widths[mine]
        )
        option = drafts.options(self._sizes, self._step_ms[mine])[draft_width]
        return option, drafts.widths(option)
