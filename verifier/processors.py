"""Processors: what requests change about the target's logits before a token is chosen from them.

They come before temperature, top-k, top-p and min-p (``dflash_ops.sampling``), in this order, which is
vLLM's:

1. *logit bias*: added to the logits of its tokens.
2. *repetition penalty* r: logits of tokens in prompt or output are divided by r if positive, else multiplied
   by it.
3. *frequency and presence penalty*: taken from the logits of tokens in the output, the one as often as they
   are there, the other once.
4. *grammar*: what it does not allow behind the tokens so far is removed.
5. *allowed token ids*: all others are removed, unless the grammar would be left with none.
6. *bad words*: the last token of a bad word is removed where the output ends with all tokens before it. The
   prompt does not count.
7. *min tokens*: tokens that end the sequence are removed before so many output tokens.

Where 6 and 7 would leave no token, neither applies. Every rule looks at one row of logits and at the tokens
before it alone: the committed ones and, behind a draft, the drafts on the path to it. So the result at a
position is the same whether its prefix was committed or drafted, in a chain or in a tree, and whatever else
is in the batch. Ties are left to whoever chooses: of equal logits the lower token id comes first.

Shape letters: T rows of logits, V vocabulary, P rows of logits with penalties or with masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verifier.acceptance import ancestor_mask
from verifier.matching import Walk
from verifier.slots import ANY_TOKEN, NO_TOKEN, Slot

LEAST_REPETITION_PENALTY = 1e-6


@dataclass(frozen=True, slots=True)
class ProcessedRow:
    """One row of a step that has processors. Its logits begin at ``offset``, one for each of its nodes."""

    slot: Slot
    offset: int
    num_output: int
    """Output tokens up to the first node, which is the anchor."""
    draft_token_ids: Sequence[int] = ()
    parents: Sequence[int] = ()
    depths: Sequence[int] = (0,)
    walk: Walk | None = None
    """What its grammar allows behind each node; None if it has none."""

    @property
    def num_nodes(self) -> int:
        """The anchor included."""
        return len(self.draft_token_ids) + 1


def process(logits: Tensor, rows: Sequence[ProcessedRow]) -> Tensor:
    """Return a processed copy of the logits.

    Args:
        logits: ``[T, V]``, any float dtype; not changed.
        rows: no two share a row of logits.

    Returns:
        ``[T, V]`` float32.
    """
    processed = logits.to(torch.float32, copy=True)
    for row in rows:
        if row.slot.bias is not None:
            ids, biases = row.slot.bias
            processed[row.offset : row.offset + row.num_nodes, ids] += biases
    penalised = [row for row in rows if row.slot.processors.has_penalties]
    if penalised:
        _penalise(processed, penalised)
    masked = [row for row in rows if row.slot.processors.has_masks]
    if masked:
        _mask(processed, masked)
    return processed


def _places(rows: Sequence[ProcessedRow], device: torch.device) -> Tensor:
    """``[P]`` int64: the rows' logits, one after another."""
    places = [place for row in rows for place in range(row.offset, row.offset + row.num_nodes)]
    return torch.tensor(places, device=device)


def _column(values: Sequence[float], sizes: Tensor) -> Tensor:
    """``[P, 1]`` float32: each row's value at all of its nodes."""
    column = torch.tensor(values, dtype=torch.float32, device=sizes.device)
    return column.repeat_interleave(sizes)[:, None]


def _penalise(logits: Tensor, rows: Sequence[ProcessedRow]) -> None:
    """Apply repetition, frequency and presence penalties. Mutates ``logits``."""
    device, vocab_size = logits.device, logits.shape[1]
    places = _places(rows, device)
    sizes = torch.tensor([row.num_nodes for row in rows], device=device)
    counts = torch.cat([_per_node(row.slot.counts, row) for row in rows])  # [P, V]
    is_seen = torch.cat([_per_node(row.slot.is_in_prompt, row) for row in rows])  # [P, V]
    path_rows, path_ids = _paths(rows)
    if path_rows.shape[0]:
        flat = (path_rows * vocab_size + path_ids).to(device)
        counts.view(-1).index_add_(0, flat, torch.ones(flat.shape[0], device=device))
    is_output = counts > 0
    asked = [row.slot.processors for row in rows]
    mine = logits[places]
    repetition = _column([p.repetition_penalty for p in asked], sizes)
    repetition.clamp_(min=LEAST_REPETITION_PENALTY)  # no infinite logits
    repeated = torch.where(mine > 0, mine / repetition, mine * repetition)
    mine = torch.where(is_seen | is_output, repeated, mine)
    mine -= _column([p.frequency_penalty for p in asked], sizes) * counts
    mine -= _column([p.presence_penalty for p in asked], sizes) * is_output
    logits[places] = mine


def _per_node(values: Tensor | None, row: ProcessedRow) -> Tensor:
    assert values is not None  # rows with penalties have it
    return values.expand(row.num_nodes, -1)


def _paths(rows: Sequence[ProcessedRow]) -> tuple[Tensor, Tensor]:
    """All drafts on the paths to all nodes: the node, counted over all rows, and the draft's token."""
    nodes: list[Tensor] = []
    token_ids: list[Tensor] = []
    first = 0
    for row in rows:
        if row.draft_token_ids:
            seen = ancestor_mask(row.parents)[
                :, 1:
            ].nonzero()  # (node, ancestor) without the anchor
            nodes.append(seen[:, 0] + first)
            token_ids.append(torch.tensor(row.draft_token_ids)[seen[:, 1]])
        first += row.num_nodes
    if not nodes:
        nothing = torch.zeros(0, dtype=torch.int64)
        return nothing, nothing
    return torch.cat(nodes), torch.cat(token_ids)


def _mask(logits: Tensor, rows: Sequence[ProcessedRow]) -> None:
    """Remove what is not allowed, bad words and ends that come too early. Mutates ``logits``."""
    device = logits.device
    for row in rows:
        is_removed = _not_allowed(row, device)
        if is_removed is not None:
            logits[row.offset : row.offset + row.num_nodes].masked_fill_(is_removed, -torch.inf)
    removed = [pair for row in rows for pair in (*_early_ends(row), *_bad_words(row))]
    if not removed:
        return
    places, inverse = torch.tensor(removed, device=device)[:, 0].unique(return_inverse=True)
    before = logits[places]  # [P, V]
    after = before.clone()
    after[inverse, torch.tensor(removed, device=device)[:, 1]] = -torch.inf
    is_empty = after.amax(dim=-1, keepdim=True) == -torch.inf
    logits[places] = torch.where(is_empty, before, after)


def _not_allowed(row: ProcessedRow, device: torch.device) -> Tensor | None:
    """``[V]`` or ``[nodes, V]`` bool: tokens that the grammar or the list of allowed ones removes."""
    if row.walk is None:
        return row.slot.is_forbidden
    illegal = ~row.walk.legal.to(device)
    if row.slot.is_forbidden is None:
        return illegal
    either = illegal | row.slot.is_forbidden
    return torch.where(either.all(dim=-1, keepdim=True), illegal, either)


def _early_ends(row: ProcessedRow) -> list[tuple[int, int]]:
    """Rows of logits and the tokens that may not end the sequence there."""
    asked = row.slot.processors
    nodes = [n for n, d in enumerate(row.depths) if row.num_output + d < asked.min_tokens]
    return [(row.offset + node, token_id) for node in nodes for token_id in asked.end_token_ids]


def _bad_words(row: ProcessedRow) -> list[tuple[int, int]]:
    """Rows of logits and the tokens that would complete a bad word there."""
    words = row.slot.bad_words
    if words is None:
        return []
    most = words.num_before
    known = row.slot.last_token_ids
    ends = [
        [NO_TOKEN] * (most - len(known)) + known
    ]  # of the output, at the anchor and at every node
    for token_id, parent in zip(row.draft_token_ids, row.parents, strict=True):
        ends.append([*ends[parent], token_id][1:] if most else [])
    table = torch.tensor(ends, dtype=torch.int64).reshape(len(ends), 1, most)
    is_match = (words.beginnings == table) | (words.beginnings == ANY_TOKEN)  # [nodes, W, M]
    found = is_match.all(dim=-1).nonzero().tolist()
    return [(row.offset + node, words.last_token_ids[word]) for node, word in found]
