"""The target's features of committed positions, as one drafter wants them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_wire.records import Ingest


class FeatureReader:
    """Reads what ingests name out of the lanes' FeaturePools. Owner: a drafter; never writes.

    Shape letters: T positions, U layers tapped for all drafters of the target, K of this drafter's, H hidden.

    Args:
        pools: one per lane, ``[rows, U*H]``.
        taps: places of the K layers among the U, in the drafter's own order; None: these are all.
        hidden_size: H.
        dtype: of what is read.
        device: of the drafter.
    """

    def __init__(
        self,
        pools: Sequence[Tensor],
        taps: list[int] | None,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._pools = pools
        self._taps = None if taps is None else torch.tensor(taps, device=device)
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device

    def read(self, lanes: list[tuple[int, list[Ingest]]]) -> Tensor | None:
        """Return features ``[T, K*H]`` of all lanes' ingests, one after the other; None if there are none."""
        found: list[Tensor] = []
        for lane, ingests in lanes:
            rows: list[int] = []
            for i in ingests:
                first = i.feature_offset
                rows += range(first, first + i.num_tokens * i.stride, i.stride)
            if rows:
                found.append(self._pools[lane][torch.tensor(rows, device=self._device)])
        if not found:
            return None
        return self.picked(found[0] if len(found) == 1 else torch.cat(found))

    def picked(self, rows: Tensor) -> Tensor:
        """Rows of a pool ``[T, U*H]`` -> features ``[T, K*H]``."""
        if self._taps is not None:
            per_layer = rows.unflatten(1, (-1, self._hidden_size))
            rows = per_layer[:, self._taps].flatten(1)
        return rows.to(self._dtype)
