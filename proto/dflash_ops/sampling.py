"""How a token is chosen from logits: greedy, or coupled sampling with temperature, top-k, top-p.

Drafter and verifier call the same function, the verifier on the target's logits and the drafter on
its own, so a draft token is accepted exactly when both choose the same token under the same noise.

Order of processors: temperature, top-k, top-p. Rules: top-k keeps the k largest logits; top-p keeps
the shortest prefix of the remaining tokens in descending probability whose mass reaches p, the first
always included; equal logits keep the order in which ``torch.topk``/stable ``torch.sort`` put them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_ops.noise import gumbel_noise
from dflash_wire.records import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingRun:
    """Consecutive packed logits rows ``[start, end)`` that share one request's parameters.

    ``first_position`` is the absolute position of the token chosen from row ``start``; the others
    follow it (``positions`` overrides this for tree rows).
    """

    start: int
    end: int
    first_position: int
    params: SamplingParams
    positions: tuple[int, ...] | None = None


def _candidates(scores: Tensor, top_k: list[int], top_p: list[float]) -> tuple[Tensor, Tensor]:
    """Sorted candidate scores ``[T, n]`` with removed ones at -inf, and their token ids."""
    device = scores.device
    vocab_size = scores.shape[1]
    limits = [k if 0 < k < vocab_size else vocab_size for k in top_k]
    widest = max(limits)
    needs_order = widest < vocab_size or min(top_p) < 1.0 or min(limits) < vocab_size
    if not needs_order:
        return scores, torch.arange(vocab_size, device=device).expand_as(scores)
    if widest < vocab_size:
        values, ids = scores.topk(widest, dim=-1)
    else:
        values, ids = scores.sort(dim=-1, descending=True, stable=True)
    if min(limits) < widest:
        rank = torch.arange(widest, device=device)
        values = values.masked_fill(
            rank >= torch.tensor(limits, device=device)[:, None], -torch.inf
        )
    if min(top_p) < 1.0:
        probabilities = values.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        keep_mass = torch.tensor([p if p < 1.0 else 2.0 for p in top_p], device=device)[:, None]
        is_removed = before >= keep_mass
        is_removed[:, 0] = False
        values = values.masked_fill(is_removed, -torch.inf)
    return values, ids


def choose_tokens(logits: Tensor, runs: Sequence[SamplingRun]) -> Tensor:
    """Choose one token per logits row.

    Args:
        logits: ``[T, V]``, any float dtype.
        runs: cover the rows to choose from; each row at most once.

    Returns:
        ``[T]`` int64. Rows outside every run get their greedy token.
    """
    chosen = logits.argmax(dim=-1)
    sampled = [run for run in runs if run.params.temperature > 0]
    if not sampled:
        return chosen
    device = logits.device
    rows: list[int] = []
    positions: list[int] = []
    params: list[SamplingParams] = []
    for run in sampled:
        count = run.end - run.start
        rows += range(run.start, run.end)
        positions += run.positions or range(run.first_position, run.first_position + count)
        params += [run.params] * count
    index = torch.tensor(rows, device=device)
    temperatures = torch.tensor([p.temperature for p in params], device=device)
    scores = logits[index].float() / temperatures[:, None]
    values, ids = _candidates(scores, [p.top_k for p in params], [p.top_p for p in params])
    seeds = torch.tensor([p.seed for p in params], dtype=torch.int64, device=device)
    noise = gumbel_noise(seeds, torch.tensor(positions, device=device), ids)
    best = (values + noise).argmax(dim=-1, keepdim=True)
    chosen[index] = ids.gather(1, best)[:, 0]
    return chosen
