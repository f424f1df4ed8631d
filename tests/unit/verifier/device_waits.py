"""Finds, on a CPU, what would make the host wait for a GPU, or could not be captured there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITING = frozenset(
    {
        "_local_scalar_dense",  # item(), bool(), int()
        "nonzero",
        "masked_select",
        "unique",
        "equal",
        "lift_fresh",  # torch.tensor(...) of the host's numbers
    }
)
ON_TENSORS = ("tolist", "item", "cpu", "numpy")


class _Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in WAITING, f"aten.{name} waits for the device"
        if name in {"index", "index_put", "index_put_"}:
            masks = [i for i in args[1] if i is not None and i.dtype in {torch.bool, torch.uint8}]
            assert not masks, "a mask as an index waits for the device"
        return func(*args, **(kwargs or {}))


@contextmanager
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail at the first operation inside that needs a tensor's numbers on the host."""

    def refused(*_: Any, **__: Any) -> None:
        pytest.fail("a tensor's numbers are asked for on the host")

    with monkeypatch.context() as patch, _Watch():
        for name in ON_TENSORS:
            patch.setattr(torch.Tensor, name, refused)
        yield
