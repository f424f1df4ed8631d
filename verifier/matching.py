"""Where a sequence stands in its grammar, and what may follow behind each of its drafts.

Shape letters: V vocabulary, N draft tokens of a row.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dflash_wire.errors import FatalError

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarMatcher


logger = logging.getLogger(__name__)

MOST_WALK_S = 0.25
"""CPU time of one walk. Behind one that took longer the sequence may only end: all others wait meanwhile, and
the next would take longer still. Nearly all such grammars are found beforehand, by the gateway's worker."""


class Walk(NamedTuple):
    """What a grammar says of one row."""

    legal: Tensor
    """``[N + 1, V]`` bool on the CPU: what may follow each node. Behind a draft that is not legal, anything:
    it cannot be accepted."""
    draft_token_ids: list[int]
    """The drafts, better ones in the places of some."""
    forced: frozenset[int]
    """Nodes that only one token may follow."""
    written: frozenset[int]
    """Nodes whose drafts are the grammar's and not the drafter's."""


class _Walker:
    """One walk of a matcher along a row's drafts, subtree by subtree. Owner: ``GrammarMatch.walk``.

    A draft that is not legal would be wasted, with all behind it. Where the grammar leaves one token, or one
    text, that takes the draft's place; of a text, the longest tokens that spell it. They are drafts like
    others: the target may spell the text otherwise.

    Args:
        matcher: goes to and fro, and is where it was behind ``leave``.
        draft_token_ids: N.
        vocab_size: V.
        end_mask: one row of words: the tokens that end a sequence.
        is_over: only these may follow the anchor.
        writes_texts: put texts into drafts' places, not only tokens.
    """

    def __init__(
        self,
        matcher: GrammarMatcher,
        draft_token_ids: Sequence[int],
        vocab_size: int,
        end_mask: np.ndarray,
        is_over: bool,
        writes_texts: bool,
    ) -> None:
        self._matcher = matcher
        self._writes_texts = writes_texts
        self._vocab_size = vocab_size
        self._end_mask = end_mask
        self._masks = np.full(
            (len(draft_token_ids) + 1, len(end_mask)), 0xFFFFFFFF, dtype=np.uint32
        )
        self._words = torch.from_numpy(self._masks.view(np.int32))
        self._drafts = list(draft_token_ids)
        self._num_taken = 0
        self._lengths = {0: 0}
        """Of the nodes that were entered: steps of the matcher up to them."""
        self._over = {0} if is_over else set[int]()
        """Nodes that only ends may follow."""
        self._only: dict[int, int] = {}
        """Nodes that one token may follow, and that token."""
        self._texts: dict[int, list[int]] = {}
        """Nodes behind which the rest of a text is to be drafted."""
        self._written: set[int] = set()

    def enter(self, node: int, parent: int) -> bool:
        """Go to a draft from its parent; return whether it is legal, or could be made so. Mutates."""
        if parent not in self._lengths:
            return False
        self._matcher.rollback(self._num_taken - self._lengths[parent])
        self._num_taken = self._lengths[parent]
        text = self._texts.pop(parent, [])
        token_id = self._only.get(parent, text[0] if text else self._drafts[node - 1])
        if parent in self._over:
            if not holds(self._end_mask, token_id):
                return False
            self._over.add(node)
        else:
            if not self._matcher.accept_token(token_id):
                text = self._matcher.find_jump_forward_tokens() if self._writes_texts else []
                if not text or not self._matcher.accept_token(text[0]):
                    return False
                token_id = text[0]
            self._num_taken += 1
        if token_id != self._drafts[node - 1]:
            self._drafts[node - 1] = token_id
            self._written.add(node)
        if text[1:] and token_id == text[0]:
            self._texts[node] = text[1:]
        self._lengths[node] = self._num_taken
        return True

    def look(self, node: int) -> None:
        """Find what may follow the node that the matcher is at. Mutates."""
        if node in self._over or not fill(self._matcher, self._words, node):
            self._over.add(node)
            self._masks[node] = self._end_mask
        only = only_token(self._masks[node])
        if only is not None:
            self._only[node] = only

    def leave(self) -> Walk:
        """Go back to the anchor. Mutates."""
        self._matcher.rollback(self._num_taken)
        bits = np.unpackbits(
            self._masks.view(np.uint8), axis=1, count=self._vocab_size, bitorder="little"
        )
        legal = torch.from_numpy(bits.view(np.bool_))
        return Walk(legal, self._drafts, frozenset(self._only), frozenset(self._written))


class GrammarMatch:
    """One sequence's place in its grammar. Owner: its slot.

    Between steps it stands behind the committed tokens. ``walk`` goes on along drafts and comes back.

    Where the grammar leaves nothing at all, which a grammar can that describes no text, the sequence may end.

    Args:
        compiled: the grammar.
        vocab_size: V, of the target's logits.
        end_token_ids: what may come behind the end.
    """

    def __init__(
        self, compiled: CompiledGrammar, vocab_size: int, end_token_ids: Sequence[int]
    ) -> None:
        from xgrammar import GrammarMatcher

        self._matcher = GrammarMatcher(compiled)
        self._vocab_size = vocab_size
        self._end_mask = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
        for token_id in end_token_ids:
            self._end_mask[token_id // 32] |= np.uint32(1 << token_id % 32)
        self._is_over = False
        """It has ended, or cannot go on; only ends may follow."""

    @property
    def is_over(self) -> bool:
        """Whether only tokens that end the sequence may follow, and have."""
        return self._is_over

    @property
    def is_stuck(self) -> bool:
        """Whether nothing may follow by the grammar, not even the end."""
        words = torch.zeros(1, len(self._end_mask), dtype=torch.int32)
        return not (self._is_over or fill(self._matcher, words, 0))

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take in committed tokens. Mutates.

        Raises:
            FatalError: a token is not legal, which it was made to be.
        """
        for token_id in token_ids:
            if self._is_over:
                return
            if not self._matcher.accept_token(token_id):
                if not holds(self._end_mask, token_id):
                    raise FatalError(f"token {token_id} was committed against its grammar")
                self._is_over = True
            elif self._matcher.is_terminated():
                self._is_over = True

    def walk(
        self, draft_token_ids: Sequence[int], parents: Sequence[int], were_sampled: bool = False
    ) -> Walk:
        """Find what may follow each node, and better drafts. Mutates nothing, but a slow walk is the last.

        Args:
            draft_token_ids: N.
            parents: N parent nodes, ``parents[j] <= j``; any tree.
            were_sampled: the drafts' distribution is known and has to stay: no text takes the place of one.
                A token does that is the only one, for then the target has the same distribution.
        """
        began = time.thread_time()
        walker = _Walker(
            *(self._matcher, draft_token_ids, self._vocab_size, self._end_mask),
            is_over=self._is_over,
            writes_texts=not were_sampled,
        )
        for node in depth_first(parents):
            if node == 0 or walker.enter(node, parents[node - 1]):
                walker.look(node)
        walk = walker.leave()
        took = time.thread_time() - began
        if took > MOST_WALK_S:
            logger.warning("a walk through a grammar took %.2f s; its sequence has to end", took)
            self._is_over = True
        return walk


def fill(matcher: GrammarMatcher, words: Tensor, row: int) -> bool:
    """Write what may follow, by the grammar, into a row of ``[.., V / 32] int32``.

    Returns:
        whether anything may; behind the end nothing may.
    """
    if matcher.is_terminated():
        return False
    matcher.fill_next_token_bitmask(words, row)
    return bool(words[row].any())


def holds(mask: np.ndarray, token_id: int) -> bool:
    """Whether a token is in a mask."""
    return bool(mask[token_id // 32] >> np.uint32(token_id % 32) & np.uint32(1))


def only_token(mask: np.ndarray) -> int | None:
    """Return the token of a mask that has one bit; None if it has another number of them."""
    (places,) = mask.nonzero()
    if len(places) != 1:
        return None
    word = int(mask[places[0]])
    return 32 * int(places[0]) + word.bit_length() - 1 if word & (word - 1) == 0 else None


def depth_first(parents: Sequence[int]) -> list[int]:
    """Return all nodes of a tree, the anchor (0) first and every subtree in one piece."""
    if all(parent == j for j, parent in enumerate(parents)):
        return list(range(len(parents) + 1))  # a chain
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for j, parent in enumerate(parents):
        children[parent].append(j + 1)
    order, waiting = list[int](), [0]
    while waiting:
        node = waiting.pop()
        order.append(node)
        waiting += reversed(children[node])
    return order
