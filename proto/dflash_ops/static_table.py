"""Numbers that change from pass to pass, at a place on the device that does not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class StaticTable:
    """A matrix of integers that the host fills and captured passes read.

    Owner: whoever runs the passes. On a GPU the host's copy is pinned, so that sending it waits for nothing.

    Args:
        rows: lines.
        columns: of every line.
        device: of the passes.
    """

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(rows, columns, dtype=torch.int64, pin_memory=is_cuda)
        self._values: Any = self._host.numpy()
        self._sent = torch.cuda.Event() if is_cuda else None
        self.on_device: Tensor = torch.zeros(rows, columns, dtype=torch.int64, device=device)

    def values(self) -> Any:
        """The host's copy as an array that may be written; waits until the device has read what was sent."""
        if self._sent is not None:
            self._sent.synchronize()
        return self._values

    def send(self) -> None:
        """Copy everything to the device, behind what it has to do already."""
        self.on_device.copy_(self._host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()
