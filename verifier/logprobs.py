"""Log-probabilities of committed tokens: of the target's logits as they are, before any processing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_ops.sampling import largest_scores
from dflash_wire.processors import TokenLogprobs


class Asked(NamedTuple):
    """One row that asks for log-probabilities."""

    places: list[int]
    """The rows of logits that its committed tokens were chosen from."""
    token_ids: list[int]
    """These tokens."""
    num_top: int
    """Alternatives to report."""


def logprobs_of(logits: Tensor, asked: Sequence[Asked]) -> list[list[TokenLogprobs]]:
    """Report log-probabilities row by row.

    Args:
        logits: ``[T, V]``, any float dtype.
        asked: rows, none of them empty.

    Returns:
        for every row and each of its tokens.
    """
    device = logits.device
    places = torch.tensor([place for row in asked for place in row.places], device=device)
    token_ids = torch.tensor([t for row in asked for t in row.token_ids], device=device)
    scores = logits[places].float()  # [S, V]
    total = scores.logsumexp(dim=-1, keepdim=True)  # [S, 1]
    chosen = (scores.gather(1, token_ids[:, None]) - total)[:, 0].tolist()
    num_top = min(max(row.num_top for row in asked), scores.shape[1])
    top_ids: list[list[int]] = [[] for _ in chosen]
    top_logprobs: list[list[float]] = [[] for _ in chosen]
    if num_top:
        values, ids = largest_scores(scores, num_top)
        top_ids, top_logprobs = ids.tolist(), (values - total).tolist()
    result: list[list[TokenLogprobs]] = []
    start = 0
    for row in asked:
        end, most = start + len(row.places), row.num_top
        result.append(
            [
                TokenLogprobs(chosen[i], top_ids[i][:most], top_logprobs[i][:most])
                for i in range(start, end)
            ]
        )
        start = end
    return result
