"""What rows ask of the verifier beyond tokens, and where it keeps what that needs."""

from __future__ import annotations

from heapq import heappop, heappush

from dflash_wire.processors import RowExtras, SlotStart
from gateway.coordinator.sequence import Sequence


class ExtrasSlots:
    """Numbers of the verifier's slots, one for every running sequence that has processors.

    Owner: the planner. A slot is filled by the prefill row that samples, with all tokens that its processors
    read: so preemption, shared pages and a new verifier need nothing of their own. A number may be used again
    at once, as pages may: the verifier runs steps in order.

    Invariant: no more numbers are out than sequences are running.
    """

    def __init__(self) -> None:
        self._free: list[int] = []
        self._num_known = 0

    def of_prefill(self, sequence: Sequence, end: int) -> RowExtras | None:
        """Return the extras of a prefill row that ends before position ``end``. Mutates."""
        extras = self._start(sequence) if end == sequence.num_committed else None
        if sequence.asks_prompt_logprobs:
            num_top = sequence.request.num_prompt_logprobs
            behind = sequence.token_ids[end : end + 1]
            extras = (extras or RowExtras())._replace(
                num_prompt_logprobs=num_top, next_token_id=behind[0] if behind else None
            )
        return extras

    def _start(self, sequence: Sequence) -> RowExtras | None:
        """Return the extras of a prefill row that samples, and prepare those of the verify rows. Mutates.

        Args:
            sequence: its ``num_cached`` tokens are in front of the row.
        """
        request = sequence.request
        processors = request.processors
        if processors is None and request.num_logprobs is None:
            return None
        slot = sequence.extras.slot if sequence.extras else None
        if processors is not None and slot is None:
            slot = self._take()
        extras = RowExtras(request.num_logprobs, slot)
        sequence.extras = extras
        if processors is None:
            return extras
        sequence.extras = extras._replace(draft_bias=processors.draft_bias)
        before = sequence.token_ids[: sequence.num_cached] if processors.reads_tokens else []
        start = SlotStart(processors, len(request.prompt_token_ids), before)
        return extras._replace(start=start)

    def release(self, sequence: Sequence) -> None:
        """Take back what a sequence that ended, or has to start over, holds. Mutates."""
        if sequence.extras is not None:
            if sequence.extras.slot is not None:
                heappush(self._free, sequence.extras.slot)
            sequence.extras = None

    def _take(self) -> int:
        if self._free:
            return heappop(self._free)
        self._num_known += 1
        return self._num_known - 1
