"""Speculative sampling by rejection, as in Leviathan et al. 2023 (arXiv 2211.17192).

Draft x, sampled from q, is kept with probability min(1, p(x) / q(x)), p being the target's processed
distribution at its place. The first draft that is not kept is replaced by a sample of max(p - q, 0),
rescaled; behind drafts that are all kept comes a sample of p. So every output token has distribution p,
whatever q is and however many drafts are verified, as long as that number does not depend on the drafts' own
draws.

Draws are noise of seed and position, as everywhere here. A position is decided once; what drafts behind a
rejected one were drawn with has decided nothing, so it may be drawn again. Samples of p and of the residual
take the noise of ``coupled`` sampling: plain decoding is the same in both modes.

Shape letters: N draft tokens of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_ops.noise import gumbel_noise, uniform_noise
from dflash_ops.sampling import SamplingRun, candidates_of
from dflash_wire.errors import FatalError
from dflash_wire.proposals import Proposal


def choose_by_rejection(
    logits: Tensor,
    run: SamplingRun,
    draft_token_ids: Sequence[int],
    proposals: Sequence[Proposal],
) -> list[int]:
    """Choose the token behind the anchor and behind all drafts but the last, as if those before were kept.

    Where it is the draft itself, the draft is kept; so following the choices is sampling by rejection.

    Args:
        logits: ``[T, V]`` behind all processors that look at tokens.
        run: of the row's chain, with a temperature.
        draft_token_ids: N.
        proposals: N; what each was sampled from.

    Returns:
        N choices.

    Raises:
        FatalError: there are not as many proposals as drafts.
    """
    if len(proposals) != len(draft_token_ids):
        raise FatalError(f"{len(proposals)} proposals for {len(draft_token_ids)} drafts")
    count = len(draft_token_ids)
    found = candidates_of(
        logits, [SamplingRun(run.start, run.start + count, run.first_position, run.params)]
    )
    assert found is not None  # the row has a temperature
    target = torch.zeros(count, logits.shape[1], dtype=torch.float64, device=logits.device)
    target.scatter_(1, found.token_ids, found.scores.softmax(dim=-1, dtype=torch.float64))
    drafted = torch.zeros_like(target)  # [N, V]
    for i, (token_ids, probabilities) in enumerate(proposals):
        ids = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
        drafted[i, ids] = torch.tensor(probabilities, dtype=torch.float64, device=logits.device)
    drafts = torch.tensor(draft_token_ids, device=logits.device)[:, None]  # [N, 1]
    coins = uniform_noise(found.seeds, found.positions)
    chances = drafted.gather(1, drafts)[:, 0]
    # A drafter that had no token to sample from says so with a chance of 0.
    is_kept = (chances > 0) & (coins * chances < target.gather(1, drafts)[:, 0])
    residual = (target - drafted).clamp_(min=0.0)
    # Nothing is left where both are the same; then a draft is rejected by rounding alone.
    residual = torch.where(residual.sum(dim=1, keepdim=True) > 0, residual, target)
    ids = torch.arange(logits.shape[1], device=logits.device).expand_as(residual)
    noise = gumbel_noise(found.seeds, found.positions, ids)
    sampled = (residual.log() + noise).argmax(dim=1)
    chosen: list[int] = torch.where(is_kept, drafts[:, 0], sampled).tolist()
    return chosen
