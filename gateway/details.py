"""What a piece of an answer carries beside its text, for requests that ask for more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class PieceDetail(NamedTuple):
    """Of one piece. A request that asks for nothing of this has pieces without one."""

    token_ids: Sequence[int] = ()
    """Output tokens since the piece before: not those after the end, and empty unless asked for."""
