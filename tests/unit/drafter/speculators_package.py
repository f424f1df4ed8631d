"""vLLM's speculators as far as its model classes need it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest


class Unused:
    """Stands for whatever the package's data code imports."""


@contextmanager
def without_data_code() -> Iterator[None]:
    """Let the package be imported without two dependencies that only its data code has: they are empty."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("datasets", "hs_connectors"):
            if name not in sys.modules:
                module = ModuleType(name)
                module.__getattr__ = lambda _: Unused  # type: ignore[method-assign]
                patch.setitem(sys.modules, name, module)
        yield
