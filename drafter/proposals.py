"""Drafts for sampling by rejection: sampled from the drafter's own distributions, which go with them.

Their noise is not the target's: under coupling both use the same, here the two must be independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from dflash_ops.noise import gumbel_noise
from dflash_ops.sampling import SamplingRun, candidates_of, largest_scores
from dflash_wire.proposals import MOST_PROPOSED, Proposal, packed_proposals

DRAFT_STREAM = 0x5DEECE66D5DEECE6
"""Turns a request's seed into the one that its drafts are sampled with."""


class SampledDraft(NamedTuple):
    """Draft tokens of one row and what they were sampled from."""

    token_ids: list[int]
    proposals: bytes
    """``packed_proposals``."""


def sample_drafts(logits: Tensor, runs: Sequence[SamplingRun]) -> list[SampledDraft]:
    """Sample one draft per run, each slot from its likeliest tokens.

    Args:
        logits: ``[T, V]``, any float dtype.
        runs: all with a temperature.
    """
    found = candidates_of(logits, runs)
    if found is None:
        return []
    scores, places = largest_scores(found.scores, min(MOST_PROPOSED, found.scores.shape[1]))
    ids = found.token_ids.gather(1, places)  # [S, n]
    noise = gumbel_noise(found.seeds ^ DRAFT_STREAM, found.positions, ids)
    best = (scores + noise).argmax(dim=-1, keepdim=True)
    chosen = ids.gather(1, best)[:, 0].tolist()
    all_ids, all_chances = ids.tolist(), scores.softmax(dim=-1).tolist()
    drafts: list[SampledDraft] = []
    start = 0
    for run in runs:
        end = start + run.end - run.start
        pairs = zip(all_ids[start:end], all_chances[start:end], strict=True)
        packed = packed_proposals([_possible(*pair) for pair in pairs])
        drafts.append(SampledDraft(chosen[start:end], packed))
        start = end
    return drafts


def _possible(token_ids: list[int], chances: list[float]) -> Proposal:
    kept = [i for i, chance in enumerate(chances) if chance > 0]
    return Proposal([token_ids[i] for i in kept], [chances[i] for i in kept])
