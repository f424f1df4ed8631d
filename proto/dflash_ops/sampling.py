"""How a token is chosen from logits: greedy, or coupled sampling with temperature, top-k, top-p.

Drafter and verifier call the same function, the verifier on the target's logits and the drafter on
its own, so a draft token is accepted exactly when both choose the same token under the same noise.

Order of processors: temperature, top-k, top-p, min-p. Rules: top-k keeps the k largest logits; top-p keeps
the shortest prefix of the remaining tokens in descending probability whose mass reaches p, the first
always included; of equal logits the lower token id comes first. 16-bit logits are often equal, so
without that last rule a row's candidates would depend on its batch mates. Min-p removes tokens less probable
than its share of the likeliest one's probability, which depends on no other token: equal ones stay or go
together. Processors that look at the tokens before come first and are the verifier's alone
(``verifier.processors``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_ops.noise import gumbel_noise
from dflash_wire.sampling import SamplingParams

LEAST_TEMPERATURE = 1e-5
"""Of a smaller one the scores would be infinite, or no number; this one is greedy in all but name."""


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


def largest_scores(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest scores ``[T, count]`` of every row, descending, and their places.

    Equal scores are ordered by their places, which ``torch.topk`` does not promise: its answer is taken
    only when no two scores around it are equal. To look at that costs less than other ways on a CPU; a GPU
    would have to be waited for.

    Args:
        scores: ``[T, n]`` float32; n at least ``count``.
        count: at least 1.
    """
    num_scores = scores.shape[1]
    if count == num_scores:
        return scores.sort(dim=-1, descending=True, stable=True)
    if scores.device.type == "cpu":
        values, ids = scores.topk(count + 1, dim=-1)
        is_equal = values[:, 1:] == values[:, :-1]
        # Of what is removed nobody asks for the order.
        if not bool(is_equal.any()) or not bool((is_equal & (values[:, 1:] > -torch.inf)).any()):
            return values[:, :count], ids[:, :count]
    bits = (scores + 0.0).view(torch.int32)  # the sum turns -0.0 into 0.0
    rank = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)  # rises with the score
    keys = (rank << 32) + torch.arange(num_scores - 1, -1, -1, device=scores.device)
    ids = keys.topk(count, dim=-1).indices
    return scores.gather(1, ids), ids


def _candidates(scores: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """Candidate scores ``[T, n]`` with removed ones at -inf, and their token ids."""
    values, ids = _likeliest(scores, [p.top_k for p in params], [p.top_p for p in params])
    is_ordered = values is not scores
    if any(p.min_p for p in params):
        shares = [math.log(p.min_p) if p.min_p else -torch.inf for p in params]
        least = values.amax(dim=-1) + torch.tensor(shares, device=values.device)  # [T]
        values = values.masked_fill(values < least[:, None], -torch.inf)
    if is_ordered and scores.device.type == "cpu":
        # Behind the last one that any row keeps nobody needs noise. A GPU would have to be waited for.
        most = int((values > -torch.inf).sum(dim=-1).max())
        values, ids = values[:, : max(most, 1)], ids[:, : max(most, 1)]
    return values, ids


def _likeliest(scores: Tensor, top_k: list[int], top_p: list[float]) -> tuple[Tensor, Tensor]:
    """As ``_candidates``, without min-p; in descending order, unless every token stays."""
    device = scores.device
    vocab_size = scores.shape[1]
    limits = [k if 0 < k < vocab_size else vocab_size for k in top_k]
    widest = max(limits)
    needs_order = widest < vocab_size or min(top_p) < 1.0 or min(limits) < vocab_size
    if not needs_order:
        return scores, torch.arange(vocab_size, device=device).expand_as(scores)
    values, ids = largest_scores(scores, widest)
    if min(limits) < widest:
        rank = torch.arange(widest, device=device)
        values = values.masked_fill(
            rank >= torch.tensor(limits, device=device)[:, None], -torch.inf
        )
    if min(top_p) < 1.0:
        # 64 bits: the sums must not depend on how many candidates the batch mates need.
        probabilities = values.softmax(dim=-1, dtype=torch.float64)
        before = probabilities.cumsum(dim=-1) - probabilities
        keep_mass = [p if p < 1.0 else 2.0 for p in top_p]
        is_removed = before >= torch.tensor(keep_mass, dtype=torch.float64, device=device)[:, None]
        is_removed[:, 0] = False
        values = values.masked_fill(is_removed, -torch.inf)
    return values, ids


class Candidates(NamedTuple):
    """What is left of the S logits rows that are sampled, after all processors."""

    rows: Tensor
    """``[S]`` int64: which rows of the logits."""
    scores: Tensor
    """``[S, n]`` float32: logits over temperature; -inf for removed tokens."""
    token_ids: Tensor
    """``[S, n]`` int64."""
    seeds: Tensor
    """``[S]`` int64."""
    positions: Tensor
    """``[S]`` int64, of the token that is chosen from each."""


class CoupledScores(NamedTuple):
    """What sampled tokens are the largest of, for the S logits rows that are sampled."""

    rows: Tensor
    """``[S]`` int64: which rows of the logits."""
    scores: Tensor
    """``[S, n]`` float32: processed logits plus noise; -inf for removed tokens."""
    token_ids: Tensor
    """``[S, n]`` int64."""


def candidates_of(logits: Tensor, runs: Sequence[SamplingRun]) -> Candidates | None:
    """Process the logits of all rows with a temperature; None if there is no such row.

    Args:
        logits: ``[T, V]``, any float dtype.
        runs: as in ``choose_tokens``.
    """
    sampled = [run for run in runs if run.params.temperature > 0]
    if not sampled:
        return None
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
    temperatures.clamp_(min=LEAST_TEMPERATURE)
    scores = logits[index].float() / temperatures[:, None]
    values, ids = _candidates(scores, params)
    seeds = torch.tensor([p.seed for p in params], dtype=torch.int64, device=device)
    return Candidates(index, values, ids, seeds, torch.tensor(positions, device=device))


def coupled_scores(logits: Tensor, runs: Sequence[SamplingRun]) -> CoupledScores | None:
    """As ``candidates_of``, with the noise that chooses."""
    found = candidates_of(logits, runs)
    if found is None:
        return None
    noise = gumbel_noise(found.seeds, found.positions, found.token_ids)
    return CoupledScores(found.rows, found.scores + noise, found.token_ids)


def choose_plainly(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, samples: bool
) -> Tensor:
    """``choose_tokens`` where no processor removes tokens, with parameters on the device and fixed shapes.

    Args:
        logits: ``[T, V]``, any float dtype.
        temperatures: ``[T]`` float32; 0 is greedy.
        seeds: ``[T]`` int64.
        positions: ``[T]`` int64, of the tokens that are chosen.
        samples: whether any temperature may be above 0.

    Returns:
        ``[T]`` int64.
    """
    greedy = logits.argmax(dim=-1)
    if not samples:
        return greedy
    scores = logits.float() / temperatures.clamp(min=LEAST_TEMPERATURE)[:, None]
    ids = torch.arange(logits.shape[1], device=logits.device).expand_as(scores)
    sampled = (scores + gumbel_noise(seeds, positions, ids)).argmax(dim=-1)
    return torch.where(temperatures > 0, sampled, greedy)


def choose_tokens(logits: Tensor, runs: Sequence[SamplingRun]) -> Tensor:
    """Choose one token per logits row.

    Args:
        logits: ``[T, V]``, any float dtype.
        runs: cover the rows to choose from; each row at most once.

    Returns:
        ``[T]`` int64. Rows outside every run get their greedy token.
    """
    chosen = logits.argmax(dim=-1)
    coupled = coupled_scores(logits, runs)
    if coupled is not None:
        best = coupled.scores.argmax(dim=-1, keepdim=True)
        chosen[coupled.rows] = coupled.token_ids.gather(1, best)[:, 0]
    return chosen
