"""The EAGLE-3 drafter: ingest target features and tokens, then draft a chain token by token.

Position p of the pool holds keys and values of the pair (token p, hidden state of p - 1), so what a page
holds depends on the tokens up to its end alone and can be shared like a page of the target's. Position 0 has
no state before it and holds nothing. The state that the next pair needs is carried from one ingest to the
next, and to the draft pass, in a pool of its own: one state per page, that of the last position ingested
there.

Shape letters: T pairs, R rows, K tapped target layers, H hidden, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import embedding

from dflash_ops.attention import AttentionRow, StepAttention, Visible, plan_attention
from dflash_ops.norms import norm_of
from dflash_ops.paging import PagedPool
from dflash_ops.rotary import RotaryTables
from dflash_ops.sampling import SamplingRun, choose_tokens
from dflash_wire.errors import FatalError
from dflash_wire.records import Ingest, Row
from drafter.biases import apply_biases
from drafter.borrowed import BorrowedWeights
from drafter.drafter import Draft, Drafter
from drafter.eagle3.layer import FeatureProjection, PackedPairLayer, PairProjection
from drafter.eagle3.model import Eagle3Model
from drafter.features import FeatureReader
from drafter.head import DraftHead
from drafter.proposals import SampledDraft, sample_drafts
from drafter.settings import heads_per_kv
from drafter.tree import DraftTree, slot_candidates


@dataclass(slots=True)
class _Chain:
    """What is drafted of one row. Owner: one draft pass."""

    row: Row
    size: int
    """Drafts wanted."""
    token_ids: list[int] = field(default_factory=list)
    proposals: bytes = b""
    scores: list[float] = field(default_factory=list)

    def draft(self) -> Draft:
        """The finished chain, in the form that the row wants."""
        if self.row.is_tree:
            return DraftTree(self.token_ids, list(range(len(self.token_ids))), self.scores)
        if self.row.sampling.samples_drafts:
            return SampledDraft(self.token_ids, self.proposals)
        return self.token_ids


@dataclass(slots=True)
class _Pairs:
    """Pairs of one ingest pass. Owner: that pass."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[Tensor] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    """Of each pair, whose hidden state it reads: a row of this pass's states, or ``-1 - n`` for the n-th of
    ``carried``."""
    carried: list[int] = field(default_factory=list)
    """Pages whose carried states are read."""


class Eagle3Drafter(Drafter):
    """Drafts chains with an EAGLE-3 draft model; its time grows with the width.

    Args:
        model: draft model; its layer gives its weights up to the drafter.
        borrowed: the target's embedding and head.
        pool: one layer's keys and values; all lanes' pages.
        feature_pools: one per lane, ``[rows, U*H]``, shared with its verifier; read here only.
        index: which rows and ingests are this drafter's.
        taps: places of this drafter's K layers among the U, in its own order; None: these are all.
    """

    def __init__(
        self,
        model: Eagle3Model,
        borrowed: BorrowedWeights,
        pool: PagedPool,
        feature_pools: Sequence[Tensor],
        index: int = 0,
        taps: list[int] | None = None,
    ) -> None:
        num_pages = pool.num_slots // pool.page_size
        super().__init__(index, num_pages // len(feature_pools))
        self.model = model
        self.borrowed = borrowed
        self.pool = pool
        self.feature_pools = list(feature_pools)
        self.dtype = borrowed.embedding.dtype
        self._features = FeatureProjection(model)
        self._pairs = PairProjection(model.layer)  # before the layer gives its weights up
        self._layer = PackedPairLayer(model.layer, model.settings.norm_before_residual)
        self._rotary = RotaryTables(model.rotary_emb, model.norm.weight)
        self._norm = norm_of(model.norm)
        self._head = DraftHead(model, borrowed.head)
        own_embedding = model.embed_tokens
        self._embedding = borrowed.embedding if own_embedding is None else own_embedding.weight
        hidden_size = model.config.hidden_size
        self._reader = FeatureReader(self.feature_pools, taps, hidden_size, self.dtype, pool.device)
        self._heads_per_kv = heads_per_kv(model.config)
        self.carried = torch.zeros(num_pages, hidden_size, dtype=self.dtype, device=pool.device)
        """By page: the hidden state of the last position ingested there."""

    def _ingest(self, lanes: list[tuple[int, list[Ingest]]]) -> None:
        """Store keys and values of all lanes' committed pairs, and carry the states of page ends."""
        device = self.pool.device
        features = self._reader.read(lanes)
        if features is None:
            return
        pairs, ends = _Pairs(), dict[int, tuple[int, int]]()
        num_states = 0
        for _, ingests in lanes:
            for i in ingests:
                self._add_pairs(pairs, i, num_states, ends)
                num_states += i.num_tokens
        states = self._features(features)  # [T, H]
        if pairs.token_ids:
            before = states
            if pairs.carried:
                read = self.carried[torch.tensor(pairs.carried, device=device)]
                before = torch.cat([states, read.flip(0)])  # the n-th is the -1 - n-th
            hidden = before[torch.tensor(pairs.sources, device=device)]
            tokens = embedding(torch.tensor(pairs.token_ids, device=device), self._embedding)
            kv = self._pairs(tokens, hidden, self._rotary.at(pairs.positions))
            self.pool.write(torch.cat(pairs.slots), kv)
        pages = torch.tensor(list(ends), device=device)
        self.carried[pages] = states[[row for _, row in ends.values()]]

    def _add_pairs(
        self, pairs: _Pairs, ingest: Ingest, first_state: int, ends: dict[int, tuple[int, int]]
    ) -> None:
        """Append one ingest's pairs. Mutates ``pairs`` and ``ends``.

        Args:
            pairs: of the pass.
            ingest: its states are rows ``first_state`` and following of the pass.
            first_state: see ``ingest``.
            ends: by page, where what was ingested in this pass ends, and the row of its last state.
        """
        start, count, tokens = ingest.start_position, ingest.num_tokens, ingest.token_ids
        if tokens is None or len(tokens) != count:
            raise FatalError(f"an ingest at position {start} does not tell its tokens")
        page_size, page_ids, end = self.pool.page_size, ingest.page_ids, start + count
        states = range(first_state, first_state + count)
        if start == 0:
            tokens = tokens[1:]
        else:
            page = page_ids[(start - 1) // page_size]
            known = ends.get(page)
            if known is not None and known[0] == start:
                pairs.sources.append(known[1])
            else:
                pairs.carried.append(page)
                pairs.sources.append(-len(pairs.carried))
        first = end - len(tokens)
        pairs.sources += states[:-1]
        pairs.token_ids += tokens
        pairs.positions += range(first, end)
        if tokens:
            pairs.slots.append(self.pool.slots(page_ids, first, end))
        for index in range(start // page_size, -(-end // page_size)):
            stop = min(end, (index + 1) * page_size)
            ends[page_ids[index]] = (stop, states[stop - 1 - start])

    def _draft(self, rows: list[Row]) -> list[Draft]:
        """One pass per draft token, over all rows that want one more."""
        device, page_size = self.pool.device, self.pool.page_size
        chains = [_Chain(row, min(row.width, row.drafted_width) - 1) for row in rows]
        order = sorted(chains, key=lambda chain: -chain.size)  # who is done is at the end
        pages = [c.row.page_ids[(c.row.start_position - 1) // page_size] for c in order]
        hidden = self.carried[torch.tensor(pages, device=device)]  # [R, H]
        tokens = torch.tensor([c.row.token_ids[-1] for c in order], device=device)
        own_kv: Tensor | None = None
        step, num_before = None, 0
        for depth in range(order[0].size):
            active = [chain for chain in order if chain.size > depth]
            if step is None or len(active) < num_before:
                step, num_before = self._attention(active), len(active)
                own_kv = None if own_kv is None else own_kv[:num_before]
            rotation = self._rotary.at([c.row.start_position + depth for c in active])
            embeddings = embedding(tokens[:num_before], self._embedding)
            hidden, own_kv = self._layer.next_hidden(
                embeddings, hidden[:num_before], own_kv, rotation, step
            )
            normed = self._norm(hidden)
            if self.model.settings.norm_output:
                hidden = normed
            tokens = self._choose(self._head(normed), active, depth)
        return [chain.draft() for chain in chains]

    def _attention(self, chains: list[_Chain]) -> StepAttention:
        rows = [
            AttentionRow(i, 1, c.row.page_ids, c.row.start_position, Visible.CAUSAL, num_unread=1)
            for i, c in enumerate(chains)
        ]
        return plan_attention(rows, self._heads_per_kv, self.pool)

    def _choose(self, logits: Tensor, chains: list[_Chain], depth: int) -> Tensor:
        """Append one token to every chain; returns them, ``[R]``. Mutates ``chains``."""
        runs = [
            SamplingRun(i, i + 1, c.row.start_position + 1 + depth, c.row.sampling)
            for i, c in enumerate(chains)
        ]
        biased = [c.row.extras.draft_bias if c.row.extras else None for c in chains]
        apply_biases(logits, [(r, b) for r, b in zip(runs, biased, strict=True) if b is not None])
        chosen = choose_tokens(logits, runs)
        token_ids: list[int] = chosen.tolist()
        rejecting = [i for i, chain in enumerate(chains) if chain.row.sampling.samples_drafts]
        if rejecting:
            sampled = sample_drafts(logits, [runs[i] for i in rejecting])
            for i, (drafts, proposals) in zip(rejecting, sampled, strict=True):
                (token_ids[i],) = drafts
                chains[i].proposals += proposals
            chosen = torch.tensor(token_ids, device=logits.device)
        if any(chain.row.is_tree for chain in chains):
            scores = slot_candidates(logits, runs, 1)[0][:, 0].tolist()
            for chain, score in zip(chains, scores, strict=True):
                chain.scores.append(score + (chain.scores[-1] if chain.scores else 0.0))
        for chain, token_id in zip(chains, token_ids, strict=True):
            chain.token_ids.append(token_id)
        return chosen
