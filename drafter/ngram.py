"""Prompt lookup: what came after the latest words when they came before. No model, no features.

Answers repeat their prompts (code that is edited, texts that are quoted or summed up) and themselves. So the
longest suffix of the text that occurs in it once more is looked up, and the tokens behind that place are the
drafts. They cost next to nothing; where nothing repeats there are none, and the row decodes plainly.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dflash_wire.errors import FatalError
from dflash_wire.proposals import Proposal, packed_proposals
from dflash_wire.records import Ingest, Row
from drafter.drafter import Draft, Drafter
from drafter.proposals import SampledDraft
from drafter.tree import DraftTree

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class NgramSettings:
    """How alike two places must be."""

    least_match: int = 2
    """Tokens that must be the same, the anchor included; at least 1."""
    most_match: int = 8
    """Matches so long are as good as longer ones; the latest of them counts."""
    draft_block_size: int = 16
    """Longest block, anchor included."""

    @property
    def target_layer_ids(self) -> list[int]:
        """No layer of the target is tapped for it."""
        return []


class Match(NamedTuple):
    """Drafts, and how many tokens in front of them were the same."""

    token_ids: list[int]
    length: int


NO_MATCH = Match([], 0)


def look_up(text: Tokens, count: int, settings: NgramSettings) -> Match:
    """Continue ``text`` as it went on behind the latest of the places that are most like its end.

    Where that place is so near that the text ends before ``count`` tokens, what lies between is repeated.

    Args:
        text: ``[n]``, at least one token, the anchor last.
        count: drafts wanted, at least one.
    """
    last = len(text) - 1
    ends = np.flatnonzero(text[:last] == text[last])
    longest, length = ends[:0], 0
    while len(ends) and length < settings.most_match:
        longest, length = ends, length + 1
        ends = ends[ends >= length]
        ends = ends[text[ends - length] == text[last - length]]
    if length < settings.least_match:
        return NO_MATCH
    end = int(longest[-1])
    behind = text[end + 1 : end + 1 + count].tolist()
    return Match(list(itertools.islice(itertools.cycle(behind), count)), length)


class NgramDrafter(Drafter):
    """Drafts by looking up what the sequence itself said before.

    ``history`` holds the token of every committed position by slot, as other drafters' pools hold keys and
    values: so a shared page brings its tokens along, and nothing is kept per sequence.

    Args:
        settings: how it looks up.
        num_pages: of all lanes.
        page_size: tokens per page.
        num_lanes: lanes that it serves.
        index: which rows and ingests are its own.
    """

    def __init__(
        self,
        settings: NgramSettings,
        num_pages: int,
        page_size: int,
        num_lanes: int = 1,
        index: int = 0,
    ) -> None:
        super().__init__(index, num_pages // num_lanes)
        self.settings = settings
        self.history: Tokens = np.zeros((num_pages, page_size), dtype=np.int32)

    def _ingest(self, lanes: list[tuple[int, list[Ingest]]]) -> None:
        slots, page_size = self.history.reshape(-1), self.history.shape[1]
        for ingest in itertools.chain.from_iterable(ingests for _, ingests in lanes):
            tokens, start = ingest.token_ids, ingest.start_position
            if tokens is None or len(tokens) != ingest.num_tokens:
                raise FatalError(f"an ingest at position {start} does not tell its tokens")
            positions = np.arange(start, start + len(tokens))
            pages = np.array(ingest.page_ids)[positions // page_size]
            slots[pages * page_size + positions % page_size] = tokens

    def _draft(self, rows: list[Row]) -> list[Draft]:
        return [self._draft_row(row) for row in rows]

    def _draft_row(self, row: Row) -> Draft:
        count = min(row.width, row.drafted_width) - 1
        drafts, length = look_up(self._text(row), count, self.settings)
        drafts = drafts[: _num_allowed(row, drafts)]
        if not drafts:
            return drafts if not row.is_tree else DraftTree([], [], [])
        if row.is_tree:
            # Longer matches are right more often; how often, the calibration of scores finds out.
            scores = [-(depth + 1) / length for depth in range(len(drafts))]
            return DraftTree(drafts, list(range(len(drafts))), scores)
        if row.sampling.samples_drafts:
            certain = [Proposal([token_id], [1.0]) for token_id in drafts]
            return SampledDraft(drafts, packed_proposals(certain))
        return drafts

    def _text(self, row: Row) -> Tokens:
        """All committed tokens of a row's sequence, the anchor last."""
        num_read = row.start_position
        num_pages = -(-num_read // self.history.shape[1])
        pages = self.history[row.page_ids[:num_pages]] if num_pages else self.history[:0]
        return np.append(pages.reshape(-1)[:num_read], np.int32(row.token_ids[-1]))


def _num_allowed(row: Row, drafts: list[int]) -> int:
    """Drafts in front of the first that the request forbids: behind it none can be accepted."""
    bias = row.extras.draft_bias if row.extras is not None else None
    if bias is None or not bias.allowed_token_ids:
        return len(drafts)
    allowed = set(bias.allowed_token_ids)
    return next((i for i, draft in enumerate(drafts) if draft not in allowed), len(drafts))
