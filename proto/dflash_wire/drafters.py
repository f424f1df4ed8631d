"""The drafters of one target, as requests and plans name them.

Requests name a drafter, plans carry its index; the first one is the default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_wire.errors import InvalidRequestError

DEFAULT_DRAFTER = "default"
"""Name of the first drafter."""
NO_DRAFTER = "none"
"""What statistics call plain decoding; no drafter has this name."""
DRAFTER_PARAM = "dflash.drafter"


@dataclass(frozen=True, slots=True)
class DrafterLimits:
    """What one drafter can do; fixed at start."""

    name: str
    max_draft_block_size: int
    """The draft model's trained block size, anchor included; 1: it never drafts."""
    reads_tokens: bool = False
    """Whether ingests tell it the tokens of their positions (``Ingest.token_ids``)."""


def default_drafter(max_draft_block_size: int) -> tuple[DrafterLimits, ...]:
    """Return the drafters of an engine that has one alone."""
    return (DrafterLimits(DEFAULT_DRAFTER, max_draft_block_size),)


def find_drafter(drafters: Sequence[DrafterLimits], name: str | None) -> int:
    """Return the index of the drafter that ``name`` names; None is the first.

    Raises:
        InvalidRequestError: there is no such drafter.
    """
    if name is None:
        return 0
    for index, drafter in enumerate(drafters):
        if drafter.name == name:
            return index
    known = ", ".join(repr(drafter.name) for drafter in drafters)
    raise InvalidRequestError(
        f"This server has no drafter {name[:64]!r}; it has {known}.", DRAFTER_PARAM
    )
