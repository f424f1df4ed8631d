"""What a piece of an answer carries beside its text, for requests that ask for more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gateway.parsers.deltas import Delta


class PieceDetail(NamedTuple):
    """Of one piece. A request that asks for nothing of this has pieces without one."""

    token_ids: Sequence[int] = ()
    """Output tokens since the piece before: not those after the end, and empty unless asked for."""
    deltas: Sequence[Delta] = ()
    """What the text since then means, if it is parsed; the piece has no other text then."""
    num_reasoning_tokens: int = 0
    """Of the sequence up to here."""

    @property
    def has_news(self) -> bool:
        """Whether there is anything to tell a client."""
        return bool(self.token_ids or self.deltas)

    @property
    def has_only_deltas(self) -> bool:
        """Whether there is nothing but what the text means."""
        return not self.token_ids
