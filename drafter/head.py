"""Draft logits: the output head, what a config adds to it, and a smaller draft vocabulary.

Shape letters: n rows, H hidden, V target vocabulary, v draft vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from dflash_ops.products import product_of
from dflash_wire.errors import ConfigError


class LogitSettings(Protocol):
    """What is done with logits (see ``DraftSettings``)."""

    @property
    def output_multiplier(self) -> float:
        """Comes first."""

    @property
    def logit_softcap(self) -> float | None:
        """Comes second."""


class HeadSource(Protocol):
    """What a draft model says of its head."""

    lm_head: nn.Linear | None

    @property
    def settings(self) -> LogitSettings:
        """Of the model."""

    def draft_token_ids(self) -> Tensor | None:
        """The target's ids of the draft vocabulary ``[v]``; None when it is the target's own."""


class DraftHead:
    """Hidden states to logits over the target's vocabulary.

    Args:
        model: says what is done with logits; its own head, if it has one, comes first.
        borrowed: the target's head ``[V, H]``.

    Raises:
        ConfigError: the head has another size than the vocabularies.
    """

    def __init__(self, model: HeadSource, borrowed: Tensor) -> None:
        settings = model.settings
        self._multiplier, self._softcap = settings.output_multiplier, settings.logit_softcap
        self._vocab_size = borrowed.shape[0]
        self._token_ids = model.draft_token_ids()
        weight = borrowed if model.lm_head is None else model.lm_head.weight.detach()
        if model.lm_head is None and self._token_ids is not None:
            if int(self._token_ids.max()) >= self._vocab_size:
                raise ConfigError(
                    f"the draft vocabulary has token {int(self._token_ids.max())}, but the target's head "
                    f"has {self._vocab_size} rows"
                )
            weight = borrowed[self._token_ids.to(borrowed.device)]
        self._product = product_of(weight)

    def __call__(self, hidden: Tensor) -> Tensor:
        """``[n, H]`` after the final norm -> ``[n, V]``; -inf where the draft vocabulary has no token."""
        logits = self._product(hidden)
        if self._multiplier != 1.0:
            logits = logits * self._multiplier
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        if self._token_ids is None:
            return logits
        # One row of the vocabulary costs as much as one of H channels of the product that was saved, and
        # everything behind it (noise, candidates, trees) goes on knowing tokens by the target's ids.
        whole = logits.new_full((logits.shape[0], self._vocab_size), -torch.inf)
        return whole.index_copy_(1, self._token_ids, logits)
