"""The coordinator's token sink as tests see it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dflash_wire.records import GenerationStats, TokenChunk


class RecordingSink:
    """Collects chunks and notes protocol violations; ``wait_for`` serves thread tests."""

    def __init__(self) -> None:
        self.chunks: dict[str, list[TokenChunk]] = {}
        self.addresses: dict[str, set[str]] = {}
        self.violations: list[str] = []
        self.on_publish: Callable[[], None] = lambda: None
        self._condition = threading.Condition()

    def publish(self, chunks: dict[str, list[TokenChunk]]) -> None:
        self.on_publish()
        with self._condition:
            for address, group in chunks.items():
                for chunk in group:
                    self._take(address, chunk)
            self._condition.notify_all()

    def _take(self, address: str, chunk: TokenChunk) -> None:
        earlier = self.chunks.setdefault(chunk.request_id, [])
        if earlier and is_last(earlier[-1]):
            self.violations.append(f"{chunk.request_id} got a chunk after its last")
        if not chunk.token_ids and chunk.error is None:
            self.violations.append(f"{chunk.request_id} got an empty chunk")
        self._check_cycle(chunk)
        earlier.append(chunk)
        self.addresses.setdefault(chunk.request_id, set()).add(address)

    def _check_cycle(self, chunk: TokenChunk) -> None:
        num_tokens, cycle = len(chunk.token_ids), chunk.cycle
        if cycle is None:
            is_right = num_tokens <= 1  # a prefill samples one token
        else:
            # The bonus is committed too, unless the sequence ended before it.
            bonus = num_tokens - cycle.num_accepted_drafts
            is_right = cycle.num_committed == num_tokens and bonus in (
                (1,) if chunk.finish_reason is None else (0, 1)
            )
        if not is_right:
            self.violations.append(f"{chunk.request_id}: {num_tokens} tokens in {cycle}")

    def stats(self, request_id: str) -> GenerationStats:
        stats = GenerationStats()
        for chunk in self.chunks[request_id]:
            if chunk.cycle is not None:
                stats.add(chunk.cycle)
        return stats

    def tokens(self, request_id: str) -> list[int]:
        return [t for chunk in self.chunks.get(request_id, []) for t in chunk.token_ids]

    def last(self, request_id: str) -> TokenChunk:
        chunk = self.chunks[request_id][-1]
        assert is_last(chunk), f"{request_id} did not end"
        return chunk

    def has_ended(self, request_id: str) -> bool:
        chunks = self.chunks.get(request_id)
        return bool(chunks) and is_last(chunks[-1])

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float = 30.0) -> bool:
        with self._condition:
            return self._condition.wait_for(predicate, timeout_s)


def is_last(chunk: TokenChunk) -> bool:
    return chunk.finish_reason is not None or chunk.error is not None
