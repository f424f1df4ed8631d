"""What a piece of an answer carries beside its text, for requests that ask for more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dflash_wire.processors import TokenLogprobs
from gateway.parsers.deltas import Delta


class PieceDetail(NamedTuple):
    """Of one piece. A request that asks for nothing of this has pieces without one."""

    token_ids: Sequence[int] = ()
    """Output tokens since the piece before: not those after the end, and empty unless asked for."""
    logprobs: Sequence[TokenEntry] = ()
    """Of the same tokens, if asked for; of an echoed prompt's before them."""
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    """Of the prompt's tokens from the second on, if asked for; in the first piece."""
    deltas: Sequence[Delta] = ()
    """What the text since then means, if it is parsed; the piece has no other text then."""
    num_reasoning_tokens: int = 0
    """Of the sequence up to here."""

    @property
    def has_news(self) -> bool:
        """Whether there is anything to tell a client."""
        return bool(self.token_ids or self.logprobs or self.prompt_logprobs or self.deltas)

    @property
    def has_only_deltas(self) -> bool:
        """Whether there is nothing but what the text means."""
        return not (self.token_ids or self.logprobs or self.prompt_logprobs)


class TokenEntry(NamedTuple):
    """One token and what the engine says about it."""

    token_id: int
    logprobs: TokenLogprobs | None
    """None: nothing is before it that could predict it."""
