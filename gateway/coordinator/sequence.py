"""One generation as the coordinator sees it."""

from __future__ import annotations

from typing import NamedTuple

from dflash_wire.errors import ExecutorsReplacedError
from dflash_wire.processors import RowExtras, TokenLogprobs
from dflash_wire.records import GenerationRequest, GenerationStats
from gateway.coordinator.outstanding import outstanding_tokens
from gateway.coordinator.policy import BlockPolicy
from gateway.coordinator.prefix_cache import PageNames

MOST_LOSSES = 2
"""Times that executors may be lost during a sequence's steps: it may be what they die of."""
WARM = 0.75
"""Temperatures above this are a class of their own: their drafts fare worse."""


def traffic_class(drafter: int, request: GenerationRequest) -> str:
    """Name a class by drafter, temperature and mode, and by whether a grammar corrects the drafts."""
    sampling, processors = request.sampling, request.processors
    temperature = sampling.temperature
    heat = "greedy" if temperature == 0 else "warm" if temperature <= WARM else "hot"
    mode = ":rejection" if sampling.samples_drafts else ""
    form = ":guided" if processors is not None and processors.grammar else ""
    return f"{drafter}:{heat}{mode}{form}"


class PendingIngest(NamedTuple):
    """Features that a later plan must have ingested (see ``Ingest``)."""

    feature_offset: int
    num_tokens: int
    start_position: int
    stride: int = 1

    def joined(self, more: PendingIngest) -> PendingIngest | None:
        """Return one run of both, if ``more`` is the next token, as far behind as each was behind the one
        before it; None if it is not."""
        gap = more.feature_offset - self.feature_offset - (self.num_tokens - 1) * self.stride
        is_regular = gap == self.stride or (self.num_tokens == 1 and gap > 0)
        if more.num_tokens != 1 or not is_regular:
            return None
        return self._replace(num_tokens=self.num_tokens + 1, stride=gap)


class LastCycle(NamedTuple):
    """The step of a sequence's last cycle, and when it was committed (seconds)."""

    step_id: int
    committed_at: float


class Sequence:
    """Committed tokens of one request and where its caches stand.

    Owner: the coordinator, from ``submit`` until the request ends; never reused. The driver thread
    alone mutates it, except for ``seq_id`` (set once by the inbox, before the driver sees it) and
    ``is_cancelled`` (set once, by any thread).

    Invariants between steps:
        target KV covers [0, num_cached); drafter context too, once ``pending_ingests`` are done, if the
            policy may draft; they are in order and without gaps
        prefilling: num_cached < num_committed
        decoding: num_cached == anchor_position == num_committed - 1
        num_committed < max_length while the sequence is alive
    """

    __slots__ = (
        "context",
        "drafter",
        "extras",
        "is_cancelled",
        "is_decoding",
        "is_in_flight",
        "is_urgent",
        "last_cycle",
        "max_length",
        "num_cached",
        "num_losses",
        "num_named_pages",
        "num_overtakes",
        "num_prefix_tokens",
        "page_names",
        "pending_ingests",
        "policy",
        "prompt_logprobs",
        "request",
        "seq_id",
        "stats",
        "stop_token_ids",
        "token_ids",
        "traffic_class",
    )

    def __init__(
        self,
        request: GenerationRequest,
        max_length: int,
        policy: BlockPolicy,
        page_size: int,
        drafter: int = 0,
    ) -> None:
        self.seq_id = -1
        self.request = request
        self.policy = policy
        self.drafter = drafter
        """Index of the drafter that drafts for it."""
        self.context = drafter if policy.may_draft else None
        """Index of the drafter that keeps its context, if one does."""
        self.traffic_class = traffic_class(drafter, request)
        """Sequences of one class are expected to be drafted alike."""
        self.extras: RowExtras | None = None
        """Of its verify rows; set when it begins to decode."""
        self.max_length = max_length
        self.stop_token_ids = frozenset(request.stop_token_ids)
        self.token_ids = list(request.prompt_token_ids)
        self.page_names = PageNames(page_size, request.cache_salt)
        self.num_cached = 0
        self.num_named_pages = 0
        """Full pages that the prefix cache has been told of."""
        self.num_prefix_tokens: int | None = None
        """Prompt tokens found in the prefix cache at the first admission; None before it."""
        self.is_decoding = False
        self.is_in_flight = False
        """A step that has not landed has a row of it."""
        self.last_cycle: LastCycle | None = None
        self.num_losses = 0
        """Times that executors were lost during its steps."""
        self.is_urgent = False
        self.num_overtakes = 0
        """Younger sequences that were admitted while this one waited."""
        self.is_cancelled = False
        self.pending_ingests: list[PendingIngest] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        """Of prompt tokens 1, 2, ... as far as prefills have read them, if the request asks."""
        self.stats = GenerationStats()

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Who goes first: smaller is earlier in, and later out when pages run short."""
        return (not self.is_urgent, self.request.priority, self.seq_id)

    @property
    def num_committed(self) -> int:
        """Prompt and output tokens."""
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        """Output tokens."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def asks_prompt_logprobs(self) -> bool:
        """Whether prefills have to report on the prompt."""
        return self.request.num_prompt_logprobs is not None and self.num_output == 0

    @property
    def anchor_position(self) -> int:
        """Position of the last committed token."""
        return len(self.token_ids) - 1

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be committed."""
        return self.max_length - len(self.token_ids)

    def outstanding_tokens(self, expected_output_tokens: int) -> int:
        """Expected work of this sequence; any thread may ask."""
        num_to_prefill = 0 if self.is_decoding else self.num_committed - self.num_cached
        return outstanding_tokens(num_to_prefill, self.num_remaining, expected_output_tokens)

    def outlives(self, error: Exception) -> bool:
        """Whether the sequence goes on after a step of its failed. Mutates ``num_losses``."""
        if not isinstance(error, ExecutorsReplacedError):
            return False
        self.num_losses += 1
        return self.num_losses <= MOST_LOSSES

    def add_pending(self, pending: PendingIngest) -> None:
        """Have the drafter ingest more features some time. Mutates cache state."""
        runs = self.pending_ingests
        joined = runs[-1].joined(pending) if runs else None
        if joined is None:
            runs.append(pending)
        else:
            runs[-1] = joined

    def forget_caches(self) -> None:
        """Start over with prefill of all committed tokens. Mutates cache state, never tokens."""
        self.num_cached = 0
        self.num_named_pages = 0
        self.is_decoding = False
        self.pending_ingests = []
