"""What a request may ask of the target's logits beyond ``SamplingParams``, and of what is said about them.

Only rows whose requests ask for any of it carry these records.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

MOST_TOLD = 256
"""Tokens that rows name to the drafter in every step, some 5 bytes each."""


@dataclass(frozen=True, slots=True)
class Processors:
    """Changes to the target's logits that depend on the tokens before them; every default asks for nothing.

    ``verifier.processors`` says exactly what each one does, and in which order.
    """

    repetition_penalty: float = 1.0
    """Above 0; of tokens in prompt or output."""
    presence_penalty: float = 0.0
    """Of tokens in the output."""
    frequency_penalty: float = 0.0
    """Of tokens in the output, times their number there."""
    biased_token_ids: list[int] = field(default_factory=list)
    """Each once."""
    biases: list[float] = field(default_factory=list)
    """What is added to the logits of ``biased_token_ids``."""
    bad_words: list[list[int]] = field(default_factory=list)
    """Token sequences, none empty, that the output must not hold."""
    allowed_token_ids: list[int] = field(default_factory=list)
    """Empty: all of them."""
    min_tokens: int = 0
    """Output tokens before ``end_token_ids`` may come."""
    end_token_ids: list[int] = field(default_factory=list)
    """What must not come before."""
    grammar: str = ""
    """What the output must be: one of xgrammar's structural tags, as JSON. Empty: anything."""

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on how often tokens came before."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0)

    @property
    def draft_bias(self) -> DraftBias | None:
        """What is worth telling the drafter in every step; None if that is nothing, or too much."""
        num_told = len(self.biased_token_ids) + len(self.allowed_token_ids)
        if not 0 < num_told <= MOST_TOLD:
            return None
        return DraftBias(self.biased_token_ids, self.biases, self.allowed_token_ids)

    @property
    def has_masks(self) -> bool:
        """Whether tokens can be removed."""
        return bool(self.bad_words or self.allowed_token_ids or self.min_tokens or self.grammar)

    @property
    def reads_tokens(self) -> bool:
        """Whether anything depends on which tokens came before, not on their number alone."""
        return self.has_penalties or bool(self.bad_words or self.grammar)


class SlotStart(NamedTuple):
    """All that a slot of the verifier is filled with, whatever it held before."""

    processors: Processors
    num_prompt: int
    """Of the committed tokens, the rest is output."""
    token_ids: list[int]
    """Committed tokens in front of the row's own; empty where the processors do not read them."""


class DraftBias(NamedTuple):
    """Processors that change logits the same at every place, for the drafter, where they are few tokens."""

    biased_token_ids: list[int]
    biases: list[float]
    allowed_token_ids: list[int]
    """Empty: all of them."""


class RowExtras(NamedTuple):
    """What a row asks for beyond tokens."""

    num_logprobs: int | None = None
    """As in ``GenerationRequest``."""
    slot: int | None = None
    """Where the verifier keeps what the row's processors need; None: the row has no processors."""
    start: SlotStart | None = None
    """Fills the slot. In prefill rows that sample; verify rows find the slot filled."""
    num_prompt_logprobs: int | None = None
    """As in ``GenerationRequest``; in prefill rows."""
    next_token_id: int | None = None
    """Committed token behind the row's, if there is one, for ``num_prompt_logprobs``."""
    draft_bias: DraftBias | None = None
    """In verify rows. It saves drafts that would be rejected; tokens do not depend on it."""


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one output position, of the target's logits before any processing."""

    logprob: float
    """Of the chosen token."""
    top_token_ids: list[int]
    """The likeliest, best first; of equal ones the lower id comes first."""
    top_logprobs: list[float]
