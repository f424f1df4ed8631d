"""What a piece of an answer carries beside its text, for requests that ask for more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dflash_wire.processors import TokenLogprobs


class PieceDetail(NamedTuple):
    """Of one piece. A request that asks for nothing of this has pieces without one."""

    token_ids: Sequence[int] = ()
    """Output tokens since the piece before: not those after the end, and empty unless asked for."""
    logprobs: Sequence[TokenEntry] = ()
    """Of the same tokens, if asked for; of an echoed prompt's before them."""
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    """Of the prompt's tokens from the second on, if asked for; in the first piece."""


class TokenEntry(NamedTuple):
    """One token and what the engine says about it."""

    token_id: int
    logprobs: TokenLogprobs | None
    """None: nothing is before it that could predict it."""
