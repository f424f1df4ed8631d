"""DFlash 2's candidate selector: which of a slot's candidates follows the token chosen before it.

A draft pass scores the tokens of every slot independently. The selector keeps the best candidates of a slot
and adds, for each, how well it follows the slot's predecessor: a bilinear form of two small tables and the
slot's hidden state. Slots are walked from left to right, for the predecessor is the token just chosen.

Shape letters: n slots of all rows, V vocabulary, H hidden, Z rank, K candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from dflash_ops.sampling import SamplingRun, choose_tokens, largest_scores
from drafter.settings import SelectorSettings

Choose = Callable[[Tensor, Sequence[SamplingRun]], Tensor]
"""``choose_tokens`` or what stands for it: logits ``[T, V]`` and runs that cover them to ids ``[T]``."""


class CandidateSelector(nn.Module):
    """Adds predecessor scores to draft logits. Owner of its tables."""

    def __init__(self, vocab_size: int, hidden_size: int, settings: SelectorSettings) -> None:
        super().__init__()
        self.top_k = settings.top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, settings.rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, settings.rank))
        self.hidden_projection = nn.Linear(hidden_size, settings.rank, bias=False)
        for table in (self.predecessor_codebook, self.successor_codebook):
            nn.init.normal_(table, std=0.02)

    def rescore(
        self,
        hidden: Tensor,
        logits: Tensor,
        runs: Sequence[SamplingRun],
        anchors: Sequence[int],
        choose: Choose = choose_tokens,
    ) -> Tensor:
        """Logits of every slot given the tokens that these very logits yield for the slots before it.

        So ``choose`` on the result gives the walked path, whatever the sampling parameters, and who
        wants the distribution of a slot finds the one that its token was drawn from. A tree grown from them
        has the likeliest siblings along that path.

        Args:
            hidden: ``[n, H]``, after the final norm.
            logits: ``[n, V]``; tokens at -inf are never candidates.
            runs: one per row, its slots in order; together they cover the logits.
            anchors: one per row, the token before its first slot.
            choose: how a slot's token is chosen, of every row for itself.

        Returns:
            ``[n, V]``; -inf for all but the candidates.
        """
        unary, candidates = largest_scores(logits.float(), self.top_k)  # [n, K]
        projected = self.hidden_projection(hidden)  # [n, Z]
        successors = self.successor_codebook[candidates]  # [n, K, Z]
        rescored = torch.full_like(logits, -torch.inf)
        before = torch.tensor(anchors, device=logits.device)
        for slot in range(max((run.end - run.start for run in runs), default=0)):
            walked = [i for i, run in enumerate(runs) if run.start + slot < run.end]
            places = torch.tensor([runs[i].start + slot for i in walked], device=logits.device)
            rows = torch.tensor(walked, device=logits.device)
            query = self.predecessor_codebook[before[rows]] * projected[places]
            follows = (query[:, None] * successors[places]).sum(dim=-1)  # [rows, K]
            scores = unary[places].to(logits.dtype) + follows
            mine = torch.full_like(logits[places], -torch.inf)
            mine.scatter_(1, candidates[places], scores)
            # Of fewer tokens than candidates the rest are removed ones, and stay so.
            mine.masked_fill_(logits[places] == -torch.inf, -torch.inf)
            rescored[places] = mine
            before[rows] = choose(mine, [_one(runs[i], slot, n) for n, i in enumerate(walked)])
        return rescored


def _one(run: SamplingRun, slot: int, place: int) -> SamplingRun:
    """One slot of a run, its logits at ``place``."""
    position = run.first_position + slot
    if run.positions is not None:
        position = run.positions[slot]
    return replace(run, start=place, end=place + 1, first_position=position, positions=None)
