"""Block policies: how many draft tokens a sequence gets in its next cycle, as a chain or as a tree.

A width counts the anchor: width w means w - 1 draft tokens, width 1 is plain decoding. That of a tree counts
its nodes likewise; it may exceed the draft block, which limits how deep a tree is and not how wide.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from dflash_wire.errors import InvalidRequestError
from dflash_wire.ports import MAX_TREE_POSITIONS
from dflash_wire.records import GenerationStats

POLICY_PARAM = "dflash.policy"
MIN_STATIC_WIDTH = 2

_STATIC = re.compile(r"static(-tree)?:([0-9]{1,6})")


class BlockPolicy(Protocol):
    """Chooses draft widths. One instance serves one sequence; called by the driver thread only."""

    @property
    def name(self) -> str:
        """What clients call it."""

    @property
    def may_draft(self) -> bool:
        """Whether ``width`` can ever exceed 1; if not, the drafter keeps no context of the sequence."""

    @property
    def is_tree(self) -> bool:
        """Whether its drafts are trees."""

    def width(self, stats: GenerationStats, num_verify_rows: int) -> int | None:
        """Return the width of the sequence's next cycle, before clipping at its length limit.

        None leaves it to the block scheduler, which decides for all such sequences of a step together.

        A width may depend on history and load, never on sampled draft tokens: that would bias
        rejection sampling.

        Args:
            stats: the sequence's own history.
            num_verify_rows: sequences ready to be verified in this step, this one included.

        Returns:
            1 to the draft model's block size; of a tree, to what a step holds.
        """


@dataclass(frozen=True, slots=True)
class StaticPolicy:
    """The same width in every cycle; width 1 is the policy ``off``."""

    draft_width: int
    is_tree: bool = False

    @property
    def name(self) -> str:
        """``off``, ``static:<w>`` or ``static-tree:<n>``."""
        if self.draft_width == 1:
            return "off"
        return f"static-tree:{self.draft_width}" if self.is_tree else f"static:{self.draft_width}"

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
    is_tree: bool = False

    @property
    def may_draft(self) -> bool:
        """True: plain decoding may end at any step, so the drafter's context is kept."""
        return True

    def width(self, stats: GenerationStats, num_verify_rows: int) -> None:
        """Leave it to the block scheduler."""


ADAPTIVE = ScheduledPolicy("adaptive")
CHAINS = ScheduledPolicy("adaptive-chain")
"""As ``adaptive``, without trees; neither are there for whoever shares a step with such a row."""
TABLE = ScheduledPolicy("table")


def parse_policy(
    text: str, max_draft_block_size: int, max_tree_positions: int = MAX_TREE_POSITIONS
) -> BlockPolicy:
    """Build the policy that ``text`` names.

    Args:
        text: ``adaptive``, ``adaptive-chain``, ``table``, ``off``, ``static:<w>`` or ``static-tree:<n>``.
        max_draft_block_size: the draft model's trained block size, anchor included; 1: there is none.
        max_tree_positions: largest tree that a step holds, anchor included.

    Raises:
        InvalidRequestError: ``text`` names no policy, a width this drafter was not trained for, or too large
            a tree.
    """
    if text == "off":
        return StaticPolicy(1)
    for scheduled in (ADAPTIVE, CHAINS, TABLE):
        if text == scheduled.name:
            # Where there is nothing to schedule, nobody keeps context for it either.
            return scheduled if max_draft_block_size > 1 else StaticPolicy(1)
    match = _STATIC.fullmatch(text)
    if match:
        is_tree, width = match[1] is not None, int(match[2])
        if max_draft_block_size == 1:
            raise InvalidRequestError(
                f"Block policy {text!r} cannot work: nobody drafts here. Use 'off'.", POLICY_PARAM
            )
        if MIN_STATIC_WIDTH <= width <= (max_tree_positions if is_tree else max_draft_block_size):
            return StaticPolicy(width, is_tree)
    raise InvalidRequestError(
        f"Unknown block policy {text!r}: use 'adaptive', 'adaptive-chain', 'table', 'off', 'static:<w>' "
        f"with w from {MIN_STATIC_WIDTH} to {max_draft_block_size}, or 'static-tree:<n>' with n from "
        f"{MIN_STATIC_WIDTH} to {max_tree_positions}.",
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
