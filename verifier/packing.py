"""How the rows of a plan lie in one packed pass, and whether drafts fit their plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dflash_ops.sampling import SamplingRun
from dflash_wire.errors import FatalError
from dflash_wire.proposals import Proposal, packed_proposals, unpacked_proposals
from dflash_wire.records import DraftResult, Row, StepPlan
from verifier.acceptance import chain_parents, depths


@dataclass(frozen=True, slots=True)
class PackedRow:
    """A row's place in the packed pass.

    Packed tokens ``[offset, offset + width)``; its logits are rows
    ``[logits_offset, logits_offset + num_logits)`` of the step's logits.
    """

    row: Row
    draft_token_ids: list[int]
    parents: list[int]
    scores: bytes
    """Of a tree's nodes, for whoever calibrates them."""
    is_chain: bool
    depths: list[int]
    offset: int
    width: int
    """Positions; of a tree with few nodes, fewer than planned."""
    logits_offset: int
    num_logits: int
    proposals: bytes = b""
    """What sampled drafts were sampled from."""

    @property
    def is_short(self) -> bool:
        """Whether a chain has fewer drafts than its width asked for."""
        return not self.row.is_tree and self.width < self.row.num_positions

    @property
    def run(self) -> SamplingRun:
        """How tokens are chosen from its logits, of which there are some."""
        start, end = self.logits_offset, self.logits_offset + self.num_logits
        first = self.row.start_position + 1
        if self.row.is_prefill:
            return SamplingRun(start, end, self.row.start_position + self.width, self.row.sampling)
        places = tuple(first + depth for depth in self.depths)
        return SamplingRun(start, end, first, self.row.sampling, places)

    @property
    def rejects(self) -> bool:
        """Whether drafts are kept by chance."""
        return self.row.sampling.samples_drafts and bool(self.draft_token_ids)


def with_drafts(row: PackedRow, draft_token_ids: list[int]) -> PackedRow:
    """Return the row with other drafts at some of its places, none of which left a choice."""
    if draft_token_ids == row.draft_token_ids:
        return row
    proposals = row.proposals
    if proposals:
        proposals = replaced_proposals(proposals, row.draft_token_ids, draft_token_ids)
    return replace(row, draft_token_ids=draft_token_ids, proposals=proposals)


def replaced_proposals(proposals: bytes, before: Sequence[int], after: Sequence[int]) -> bytes:
    """Return what drafts were sampled from, some of which have been replaced: these had no alternative."""
    drawn = unpacked_proposals(proposals)
    for j, (old, new) in enumerate(zip(before, after, strict=True)):
        if old != new:
            drawn[j] = Proposal([new], [1.0])
    return packed_proposals(drawn)


def pack_rows(plan: StepPlan, drafts: DraftResult) -> list[PackedRow]:
    """Lay a plan's rows out one after another.

    Raises:
        FatalError: the drafts do not belong to this plan.
    """
    if drafts.step_id != plan.step_id or len(drafts.draft_token_ids) != len(plan.rows):
        raise FatalError(f"drafts of step {drafts.step_id} do not fit plan of step {plan.step_id}")
    packed: list[PackedRow] = []
    offset = logits_offset = 0
    for i, row in enumerate(plan.rows):
        draft_token_ids = drafts.draft_token_ids[i]
        num_drafts = len(draft_token_ids)
        if not row.is_prefill and num_drafts >= row.width:
            raise FatalError(
                f"step {plan.step_id}: {num_drafts} drafts for a row of width {row.width}"
            )
        chain = chain_parents(num_drafts)
        parents = (drafts.parents[i] if drafts.parents is not None else None) or chain
        is_chain = row.is_prefill or parents == chain
        if not is_chain or num_drafts >= row.most_kept:
            check_tree(row, parents, num_drafts)
        width = row.num_positions if row.is_prefill else num_drafts + 1
        num_logits = (1 if row.samples else 0) if row.is_prefill else width
        packed.append(
            PackedRow(
                row,
                draft_token_ids,
                parents,
                drafts.scores[i] if drafts.scores is not None else b"",
                is_chain,
                [*chain, num_drafts] if is_chain else depths(parents),
                offset,
                width,
                logits_offset,
                num_logits,
                drafts.proposals[i] if drafts.proposals is not None else b"",
            )
        )
        offset += width
        logits_offset += num_logits
    return packed


def check_tree(row: Row, parents: list[int], num_drafts: int) -> None:
    """Check that every path of a row's tree ends where its pages end.

    Raises:
        FatalError: it does not, or this is no tree.
    """
    is_tree = len(parents) == num_drafts and all(0 <= p <= j for j, p in enumerate(parents))
    if not is_tree or max(depths(parents)) >= row.most_kept:
        raise FatalError(
            f"drafts of sequence {row.seq_id} are no tree of paths of {row.most_kept} positions"
        )
