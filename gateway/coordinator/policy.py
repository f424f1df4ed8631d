"""Block policies: how wide a draft block a sequence gets in its next cycle.

A width counts the anchor: width w means w - 1 draft tokens, width 1 is plain decoding.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from dflash_wire.errors import InvalidRequestError
from dflash_wire.records import GenerationStats

POLICY_PARAM = "dflash.policy"
MIN_STATIC_WIDTH = 2

_STATIC = re.compile(r"static:([0-9]{1,6})")


class BlockPolicy(Protocol):
    """Chooses draft widths. One instance serves one sequence; called by the driver thread only."""

    @property
    def name(self) -> str:
        """What clients call it."""

    @property
    def may_draft(self) -> bool:
        """Whether ``width`` can ever exceed 1; if not, the drafter keeps no context of the sequence."""

    def width(self, stats: GenerationStats, num_verify_rows: int) -> int | None:
        """Return the width of the sequence's next cycle, before clipping at its length limit.

        None leaves it to the block scheduler, which decides for all such sequences of a step together.

        A width may depend on history and load, never on sampled draft tokens: that would bias
        rejection sampling.

        Args:
            stats: the sequence's own history.
            num_verify_rows: sequences ready to be verified in this step, this one included.

        Returns:
            1 to the draft model's block size.
        """


@dataclass(frozen=True, slots=True)
class StaticPolicy:
    """The same width in every cycle; width 1 is the policy ``off``."""

    draft_width: int

    @property
    def name(self) -> str:
        """``off`` or ``static:<w>``."""
        return "off" if self.draft_width == 1 else f"static:{self.draft_width}"

    @property
    def may_draft(self) -> bool:
        """False for ``off``."""
        return self.draft_width > 1

    def width(self, stats: GenerationStats, num_verify_rows: int) -> int:
        """Return the fixed width."""
        return self.draft_width


@dataclass(frozen=True, slots=True)
class ScheduledPolicy:
    """The block scheduler decides, step by step: by expected tokens per second, or by its table."""

    name: str

    @property
    def may_draft(self) -> bool:
        """True: plain decoding may end at any step, so the drafter's context is kept."""
        return True

    def width(self, stats: GenerationStats, num_verify_rows: int) -> None:
        """Leave it to the block scheduler."""


ADAPTIVE = ScheduledPolicy("adaptive")
TABLE = ScheduledPolicy("table")


def parse_policy(text: str, max_draft_block_size: int) -> BlockPolicy:
    """Build the policy that ``text`` names.

    Args:
        text: ``adaptive``, ``table``, ``off`` or ``static:<w>``.
        max_draft_block_size: the draft model's trained block size, anchor included.

    Raises:
        InvalidRequestError: ``text`` names no policy, or a width this drafter was not trained for.
    """
    if text == "off":
        return StaticPolicy(1)
    for scheduled in (ADAPTIVE, TABLE):
        if text == scheduled.name:
            return scheduled
    match = _STATIC.fullmatch(text)
    if match and MIN_STATIC_WIDTH <= int(match[1]) <= max_draft_block_size:
        return StaticPolicy(int(match[1]))
    raise InvalidRequestError(
        f"Unknown block policy {text!r}: use 'adaptive', 'table', 'off' or 'static:<w>' with w from "
        f"{MIN_STATIC_WIDTH} to {max_draft_block_size}.",
        POLICY_PARAM,
    )


def cycle_width(policy_width: int, num_remaining: int) -> int:
    """Clip a policy's width near the length limit.

    The last cycle drafts one token more than can be committed, as the public reference loop does;
    a single remaining token is decoded plainly.

    Args:
        policy_width: what the policy asked for.
        num_remaining: tokens the sequence may still commit, at least 1.
    """
    return 1 if num_remaining == 1 else min(policy_width, num_remaining + 1)
