"""What the verifier remembers of sequences whose logits depend on the tokens before them.

Shape letters: V vocabulary, W bad words, M tokens in front of the last one of the longest bad word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_wire.errors import FatalError
from dflash_wire.processors import Processors, SlotStart
from dflash_wire.records import Row
from verifier.grammars import GrammarPool
from verifier.matching import GrammarMatch

NO_TOKEN = -1
"""In front of the output's first token."""
ANY_TOKEN = -2
"""In front of a bad word that is shorter than the longest."""


@dataclass(frozen=True, slots=True)
class BadWords:
    """Bad words as one table."""

    beginnings: Tensor
    """``[W, M]`` int64 on the CPU: all but the last token of each, in front of them ``ANY_TOKEN``."""
    last_token_ids: list[int]

    @classmethod
    def of(cls, words: Sequence[Sequence[int]]) -> BadWords:
        """Tabulate words, none of them empty."""
        longest = max(map(len, words)) - 1
        rows = [[ANY_TOKEN] * (longest + 1 - len(word)) + list(word[:-1]) for word in words]
        table = torch.tensor(rows, dtype=torch.int64).reshape(len(words), longest)
        return cls(table, [word[-1] for word in words])

    @property
    def num_before(self) -> int:
        """M."""
        return self.beginnings.shape[1]


class Slot:
    """Processors of one sequence, and what they need to know of its tokens.

    Owner: ``SlotPool``. Everything in it is a function of the processors and of the committed tokens, so a
    slot can always be filled again from these.

    Invariant between steps, for processors that read tokens: it knows all committed tokens, the anchor too.
    """

    def __init__(
        self,
        start: SlotStart,
        row: Row,
        vocab_size: int,
        device: torch.device,
        grammars: GrammarPool | None = None,
    ) -> None:
        asked = start.processors
        self.processors: Processors = asked
        self.num_prompt = start.num_prompt
        self.num_tokens = row.start_position + len(row.token_ids)
        """Committed tokens; kept up to date for processors that read tokens."""
        self.bias: tuple[Tensor, Tensor] | None = None
        """Ids and what is added to their logits."""
        if asked.biased_token_ids:
            ids = torch.tensor(asked.biased_token_ids, device=device)
            self.bias = (ids, torch.tensor(asked.biases, dtype=torch.float32, device=device))
        self.is_forbidden: Tensor | None = None
        """``[V]`` bool: tokens that are not among the allowed ones."""
        if asked.allowed_token_ids:
            self.is_forbidden = torch.ones(vocab_size, dtype=torch.bool, device=device)
            self.is_forbidden[torch.tensor(asked.allowed_token_ids, device=device)] = False
        self.bad_words = BadWords.of(asked.bad_words) if asked.bad_words else None
        token_ids = start.token_ids + row.token_ids if asked.reads_tokens else []
        if asked.reads_tokens and len(token_ids) != self.num_tokens:
            raise FatalError(
                f"sequence {row.seq_id}: {len(token_ids)} of {self.num_tokens} tokens for its slot"
            )
        output = token_ids[self.num_prompt :]
        self.is_in_prompt: Tensor | None = None
        """``[V]`` bool."""
        self.counts: Tensor | None = None
        """``[V]`` float32, exact: how often each token is in the output."""
        if asked.has_penalties:
            self.is_in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.is_in_prompt[torch.tensor(token_ids[: self.num_prompt], device=device)] = True
            self.counts = torch.zeros(vocab_size, device=device)
        self.last_token_ids: list[int] = []
        """The end of the output, as long as bad words can be."""
        self.grammar: GrammarMatch | None = None
        if asked.grammar:
            if grammars is None:
                raise FatalError("this verifier has no vocabulary for grammars")
            compiled = grammars.compile(asked.grammar)
            self.grammar = GrammarMatch(compiled, vocab_size, grammars.end_token_ids)
        self._take(output)

    @property
    def num_output(self) -> int:
        """Output tokens, for processors that read tokens."""
        return self.num_tokens - self.num_prompt

    def advance(self, token_ids: list[int]) -> None:
        """Take in what a step has committed. Mutates."""
        if self.processors.reads_tokens:
            self.num_tokens += len(token_ids)
            self._take(token_ids)

    def check(self, row: Row) -> None:
        """Check that the slot stands where a verify row does.

        Raises:
            FatalError: it has missed a step, or belongs to another sequence.
        """
        if self.processors.reads_tokens and self.num_tokens != row.start_position + 1:
            raise FatalError(
                f"sequence {row.seq_id} is at {row.start_position + 1} tokens, its slot at "
                f"{self.num_tokens}"
            )

    def _take(self, token_ids: list[int]) -> None:
        if self.counts is not None and token_ids:
            ids = torch.tensor(token_ids, device=self.counts.device)
            self.counts.index_add_(0, ids, torch.ones(len(token_ids), device=ids.device))
        if self.bad_words is not None and self.bad_words.num_before:
            self.last_token_ids = (self.last_token_ids + token_ids)[-self.bad_words.num_before :]
        if self.grammar is not None:
            self.grammar.advance(token_ids)


class SlotPool:
    """Slots by the numbers that plans give them.

    Owner: ``VerifierEngine``. It is a pool as the K/V pool is one: plans say what lies where, a prefill that
    samples fills a slot whatever it held, and slots of sequences that have ended are never asked for. The
    coordinator hands out no more numbers than it has rows.
    """

    def __init__(
        self, vocab_size: int, device: torch.device, grammars: GrammarPool | None = None
    ) -> None:
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._device = device
        self._slots: dict[int, Slot] = {}

    def of(self, row: Row) -> Slot | None:
        """Return a row's slot, filled if the row starts it; None if it has no processors. Mutates.

        Raises:
            FatalError: the slot does not know the row's tokens.
        """
        extras = row.extras
        if extras is None or extras.slot is None:
            return None
        if extras.start is not None:
            slot = Slot(extras.start, row, self._vocab_size, self._device, self._grammars)
            self._slots[extras.slot] = slot
            return slot
        found = self._slots.get(extras.slot)
        if found is None:
            raise FatalError(f"sequence {row.seq_id} has an empty slot")
        found.check(row)
        return found
