"""What requests change about logits at every place alike: the drafter does it too, to waste no drafts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from dflash_ops.sampling import SamplingRun
from dflash_wire.processors import DraftBias


def apply_biases(logits: Tensor, biases: Iterable[tuple[SamplingRun, DraftBias]]) -> None:
    """Add biases and remove what is not allowed. Mutates.

    Args:
        logits: ``[T, V]``.
        biases: of some runs, which are counted from the first row of ``logits`` on.
    """
    for run, (token_ids, amounts, allowed) in biases:
        mine = logits[run.start : run.end]
        if token_ids:
            added = torch.tensor(amounts, dtype=logits.dtype, device=logits.device)
            mine[:, torch.tensor(token_ids, device=logits.device)] += added
        if allowed:
            is_forbidden = torch.ones(logits.shape[1], dtype=torch.bool, device=logits.device)
            is_forbidden[torch.tensor(allowed, device=logits.device)] = False
            mine.masked_fill_(is_forbidden, -torch.inf)
