"""Records that travel between gateway, coordinator, drafter and verifier.

Control records carry ids, lengths and page tables, never tensors. A ``StepPlan`` is complete in
itself: executors keep no per-sequence state beyond their pools, so a replaced executor needs
nothing but the next plan.

Units: positions and counts in tokens, times in milliseconds unless the name says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple, TypeVar

from dflash_wire.processors import Processors, RowExtras, TokenLogprobs
from dflash_wire.sampling import GREEDY, SamplingParams
from dflash_wire.trees import NodeBudget, TreeOutcome

PerRow = TypeVar("PerRow", list[int], bytes)


class FinishReason(StrEnum):
    """Why a sequence ended, in OpenAI's vocabulary."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate: what the gateway hands to the coordinator."""

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    sampling: SamplingParams = GREEDY
    stop_token_ids: list[int] = field(default_factory=list)
    """Ids that end the sequence; end-of-sequence ids are added by the gateway unless ``ignore_eos``."""
    policy: str | None = None
    """Block policy of this request, e.g. ``static:8`` or ``off``; None takes the server's default."""
    frame_address: str = ""
    """Where the coordinator pushes this request's ``TokenFrame``s; empty in-process."""
    cache_salt: str = ""
    """Requests with different salts never share a cached prefix."""
    priority: int = 0
    """Smaller goes first; among equals, arrival decides."""
    drafter: str | None = None
    """Name of the drafter that drafts for it; None takes the default one."""
    processors: Processors | None = None
    """None: the target's logits are taken as they are."""
    num_logprobs: int | None = None
    """Alternatives that are reported beside each token's log-probability; None reports nothing."""
    num_prompt_logprobs: int | None = None
    """The same for the prompt's tokens but the first. Such a prompt shares no cached prefix."""


class CycleStats(NamedTuple):
    """One draft, verify and commit of one sequence.

    A tuple, because every chunk has one: it is built four times as fast as a frozen dataclass.
    """

    num_draft_tokens: int
    num_accepted_drafts: int
    """Drafts that were accepted and committed: those behind a stop or the length do not count."""
    num_committed: int
    """Output tokens of this cycle alone, bonus included."""
    draft_ms: float
    verify_ms: float
    overhead_ms: float
    """The rest of the cycle's wall time, which begins at the end of the sequence's previous cycle
    if that was in the step before, else with the step's planning."""

    def clipped(self, num_committed: int) -> CycleStats:
        """Return this cycle as it counts when only its first ``num_committed`` tokens are kept."""
        if num_committed >= self.num_committed:
            return self
        num_accepted_drafts = min(self.num_accepted_drafts, num_committed)
        return self._replace(num_committed=num_committed, num_accepted_drafts=num_accepted_drafts)


@dataclass(slots=True)
class GenerationStats:
    """What one sequence cost; times are sums over its cycles.

    Whoever reads a sequence's chunks adds their cycles up. Tokens that prefills sampled are not in
    it: with them, ``sum(committed_per_cycle)`` is the number of output tokens.
    """

    num_cycles: int = 0
    num_draft_tokens: int = 0
    num_accepted_drafts: int = 0
    committed_per_cycle: list[int] = field(default_factory=list)
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    overhead_ms: float = 0.0
    num_cached_tokens: int = 0
    """Prompt tokens that came out of the prefix cache."""
    policy: str | None = None
    """Block policy that it began with; None before its first token."""

    def add(self, cycle: CycleStats) -> None:
        """Add one cycle. Mutates."""
        self.num_cycles += 1
        self.num_draft_tokens += cycle.num_draft_tokens
        self.num_accepted_drafts += cycle.num_accepted_drafts
        self.committed_per_cycle.append(cycle.num_committed)
        self.draft_ms += cycle.draft_ms
        self.verify_ms += cycle.verify_ms
        self.overhead_ms += cycle.overhead_ms

    @property
    def acceptance_length(self) -> float:
        """Mean committed tokens per cycle, bonus included (tau)."""
        return sum(self.committed_per_cycle) / self.num_cycles if self.num_cycles else 0.0


@dataclass(slots=True)
class TokenChunk:
    """What one step added to one request: the unit that travels to the gateway."""

    request_id: str
    token_ids: list[int]
    finish_reason: str | None = None
    """Set on the request's last chunk only."""
    cycle: CycleStats | None = None
    """The cycle that committed ``token_ids``; None for a token that a prefill sampled."""
    error: dict[str, str | None] | None = None
    """Set when the request failed (``errors.error_to_wire``); then it is the last chunk."""
    num_cached_tokens: int | None = None
    """Prompt tokens that came out of the prefix cache; set on the request's first chunk only."""
    num_before: int = 0
    """Output tokens in the chunks before this one, so that a lost chunk shows."""
    policy: str | None = None
    """Block policy that the sequence begins with; set on the request's first chunk only."""
    logprobs: list[TokenLogprobs] | None = None
    """Of every one of ``token_ids``, if the request asked for them."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of the prompt's tokens from the second on, if asked for; in the first chunk only."""


@dataclass(slots=True)
class Ingest:
    """Target features of committed positions that the drafter must take into its context pool.

    Of the FeaturePool, ``num_tokens`` rows from ``feature_offset`` on, each ``stride`` behind the one before,
    belong to positions ``[start_position, start_position + num_tokens)``. Earlier steps wrote them: one or
    several, each from its ``feature_base`` on.
    """

    feature_offset: int
    num_tokens: int
    start_position: int
    page_ids: list[int]
    drafter: int = 0
    """Index of the drafter whose context it is."""
    stride: int = 1
    token_ids: list[int] | None = None
    """The tokens at these positions, for a drafter that reads them (``DrafterLimits.reads_tokens``); None for
    others."""


@dataclass(slots=True)
class Row:
    """One sequence's share of a step.

    A *verify row* has one token, the anchor, at ``start_position`` and ``width`` positions to verify
    (anchor included; ``width == 1`` is plain decoding). Its drafts are a chain, or a tree (``is_tree``): then
    ``width`` is the most that are verified, the drafter may find fewer worth it, and no path is longer than
    the block. A *prefill row* (``is_prefill``) has
    ``len(token_ids)`` committed tokens to read; ``samples`` says whether its last position yields a
    token (the last chunk) or not.
    """

    seq_id: int
    token_ids: list[int]
    start_position: int
    page_ids: list[int]
    width: int = 1
    is_prefill: bool = False
    samples: bool = True
    sampling: SamplingParams = GREEDY
    drafter: int = 0
    """Index of the drafter that drafts a verify row wider than 1."""
    draft_width: int = 0
    """Block that the drafter fills; 0 stands for ``width``. A chain's is at least that, a tree may have more
    nodes."""
    is_tree: bool = False
    extras: RowExtras | None = None

    @property
    def drafted_width(self) -> int:
        """The block that the drafter fills, anchor included; 1 when it has nothing to do."""
        if self.width == 1:
            return 1
        if self.is_tree:
            return self.draft_width or self.width
        return max(self.width, self.draft_width)

    @property
    def num_positions(self) -> int:
        """Target positions that this row occupies in the packed pass, at most if it is a tree."""
        return len(self.token_ids) if self.is_prefill else self.width

    @property
    def most_kept(self) -> int:
        """Most positions whose K/V and features outlive the step: one path of a tree. The row needs pages for
        them, and so many rows of the FeaturePool are its own."""
        if self.is_prefill:
            return len(self.token_ids)
        return min(self.width, self.drafted_width) if self.is_tree else self.width


@dataclass(slots=True)
class StepPlan:
    """One step around the ring: coordinator -> drafters -> verifier -> coordinator.

    It passes through the drafters that have something to do, in ascending order, often one or none.

    The verifier writes the features that it keeps of a row to consecutive rows of the FeaturePool, from the
    row's ``feature_offsets`` on.
    """

    step_id: int
    rows: list[Row]
    ingests: list[Ingest] = field(default_factory=list)
    feature_base: int = 0
    num_cohorts: int = 1
    """Steps that are in flight at the same time while this one is."""
    node_budget: NodeBudget | None = None
    """None: every tree may have as many nodes as its row's width allows."""

    @property
    def num_positions(self) -> int:
        """Packed target positions of the whole step, at most if it has trees."""
        budget = self.node_budget
        if budget is None:
            return sum(row.num_positions for row in self.rows)
        own = (r.num_positions if budget.map_of(i) < 0 else 1 for i, r in enumerate(self.rows))
        return sum(own) + budget.most_nodes

    @property
    def num_features(self) -> int:
        """FeaturePool rows of the whole step, from ``feature_base`` on."""
        return sum(row.most_kept for row in self.rows)

    def feature_offsets(self) -> Iterator[int]:
        """Yield the FeaturePool row of each row's first position; a tree that turns out small moves none."""
        offset = self.feature_base
        for row in self.rows:
            yield offset
            offset += row.most_kept

    @property
    def needs_drafter(self) -> bool:
        """Whether there is anything to ingest or to draft."""
        return bool(self.ingests) or any(row.width > 1 for row in self.rows)

    @property
    def drafters(self) -> list[int]:
        """Drafters with anything to ingest or to draft, ascending: the step's way to the verifier."""
        wanted = {ingest.drafter for ingest in self.ingests}
        wanted.update(row.drafter for row in self.rows if row.width > 1)
        return sorted(wanted)


@dataclass(slots=True)
class DraftResult:
    """What the drafter adds to a plan on its way to the verifier.

    ``draft_token_ids[i]`` has ``rows[i].width - 1`` ids (empty for prefill and plain rows), or fewer if
    ``rows[i].is_tree`` or the drafter found nothing worth more; the row is verified so far.
    """

    step_id: int
    draft_token_ids: list[list[int]]
    draft_ms: float = 0.0
    parents: list[list[int]] | None = None
    """``parents[i][j]`` is the node that draft ``j`` of row ``i`` follows: 0 is the anchor, ``n`` the
    ``n``-th draft token; ``parents[i][j] <= j``. Empty: the row is a chain. None: every row is one."""
    began_s: float = 0.0
    """When drafting began, on the clock of the drafter's machine; 0.0 without a drafter."""
    scores: list[bytes] | None = None
    """``scores[i]``: of a tree (``trees.packed_scores``), empty for other rows. None: no row is one."""
    proposals: list[bytes] | None = None
    """``proposals[i]``: of sampled drafts (``proposals.packed_proposals``), empty for other rows. None: no
    row has such drafts."""

    @classmethod
    def nothing(cls, plan: StepPlan) -> DraftResult:
        """What stands in for the drafter's answer in a step without it."""
        return cls(plan.step_id, [[] for _ in plan.rows])

    def add_tree(self, row: int, token_ids: list[int], parents: list[int], scores: bytes) -> None:
        """Put a tree into a row. Mutates."""
        if self.parents is None or self.scores is None:
            self.parents = [[] for _ in self.draft_token_ids]
            self.scores = [b"" for _ in self.draft_token_ids]
        self.draft_token_ids[row], self.parents[row], self.scores[row] = token_ids, parents, scores

    def add_sampled(self, row: int, token_ids: list[int], proposals: bytes) -> None:
        """Put drafts into a row that are to be corrected by rejection. Mutates."""
        if self.proposals is None:
            self.proposals = [b"" for _ in self.draft_token_ids]
        self.draft_token_ids[row], self.proposals[row] = token_ids, proposals

    def merged(self, other: DraftResult) -> DraftResult:
        """Return this result of one drafter and that of the next as one; rows have one drafter."""
        pairs = zip(self.draft_token_ids, other.draft_token_ids, strict=True)
        began = [result.began_s for result in (self, other) if result.began_s]
        return replace(
            self,
            draft_token_ids=[mine or theirs for mine, theirs in pairs],
            draft_ms=self.draft_ms + other.draft_ms,
            parents=_merged(self.parents, other.parents),
            began_s=min(began, default=0.0),
            scores=_merged(self.scores, other.scores),
            proposals=_merged(self.proposals, other.proposals),
        )


def _merged(mine: list[PerRow] | None, theirs: list[PerRow] | None) -> list[PerRow] | None:
    """What either drafter says of each row; None if neither says anything."""
    if mine is None or theirs is None:
        return mine if theirs is None else theirs
    return [one or other for one, other in zip(mine, theirs, strict=True)]


@dataclass(slots=True)
class StepResult:
    """What the verifier found.

    ``committed_token_ids[i]``: for a verify row accepted drafts followed by the bonus token (never
    empty); for a prefill row the sampled token, or nothing when ``samples`` is false. Not yet clipped
    at stop tokens or length: that is the coordinator's.
    ``error`` is set when the step failed as a whole (``errors.error_to_wire``).
    """

    step_id: int
    committed_token_ids: list[list[int]]
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    error: dict[str, str | None] | None = None
    draft_began_s: float = 0.0
    verify_began_s: float = 0.0
    """When each began, for traces: one clock for all processes of one machine."""
    trees: list[TreeOutcome | None] | None = None
    """``trees[i]`` belongs to a row with ``is_tree``, None to any other. None: there is no tree."""
    logprobs: list[list[TokenLogprobs] | None] | None = None
    """``logprobs[i]``: of row ``i``'s committed tokens, if it asked. None: no row did."""
    prompt_logprobs: list[list[TokenLogprobs] | None] | None = None
    """``prompt_logprobs[i]``: of the tokens behind each of row ``i``'s, as far as they are known before."""
    num_drafted: list[int] | None = None
    """``num_drafted[i]``: drafts that were verified of row ``i``. None: chains had as many as their widths
    asked for."""


class StepRecord(NamedTuple):
    """One good step. Times in seconds of the monotonic clock that all processes of a machine share."""

    step_id: int
    num_cohorts: int
    num_rows: int
    num_positions: int
    num_prefill_positions: int
    num_committed: int
    """Tokens of the step's rows, not clipped."""
    planning_s: float
    sent_s: float
    draft_began_s: float
    """0.0 when the step went around the drafter."""
    draft_ms: float
    verify_began_s: float
    verify_ms: float
    landed_s: float
    published_s: float
