"""An engine without models that keeps a fixed pace: what ``make bench-gateway`` serves.

Everything else is real: the gateway, Serve, the handle call per request, and one frame per step. A
request's first chunk is one token, at once, as if a prefill had sampled it; from then on every step
gives it a draft block's worth that tells when its frame was sent.
"""

from __future__ import annotations

import asyncio
import base64
import queue
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from dflash_wire.codec import decode_request
from dflash_wire.ports import TokenSink
from dflash_wire.records import CycleStats, FinishReason, GenerationRequest, TokenChunk
from services.coordinator_deployment import CompletionSink

STAMP_BYTES = 3
FIRST_TEXT = "."


def stamp(clock_s: float) -> str:
    """Return a clock reading as four characters: microseconds modulo 2^24, big endian, in base64."""
    microseconds = int(clock_s * 1e6) % (1 << (8 * STAMP_BYTES))
    return base64.b64encode(microseconds.to_bytes(STAMP_BYTES, "big")).decode()


@dataclass(slots=True)
class _Row:
    request: GenerationRequest
    num_tokens: int = 0


class PacedEngine:
    """Stands in for a ``Coordinator``. Owner: its own thread; ``submit`` and ``cancel`` from any.

    Args:
        sink: gets one dictionary of chunks per step.
        token_ids: token of every character that ``stamp`` and ``FIRST_TEXT`` may have.
        step_s: seconds between steps.
    """

    def __init__(self, sink: TokenSink, token_ids: dict[str, int], step_s: float) -> None:
        self._sink = sink
        self._token_ids = token_ids
        self._step_s = step_s
        self._inbox: queue.SimpleQueue[GenerationRequest | str | None] = queue.SimpleQueue()
        self._rows: dict[str, _Row] = {}

    def submit(self, request: GenerationRequest) -> None:
        """Begin a request."""
        self._inbox.put(request)

    def cancel(self, request_id: str) -> None:
        """End a request without another chunk."""
        self._inbox.put(request_id)

    def close(self) -> None:
        """End ``run_forever``."""
        self._inbox.put(None)

    def run_forever(self) -> None:
        """Step at the fixed pace until ``close``; new requests get their first token between steps."""
        next_step_s = time.perf_counter() + self._step_s
        while True:
            try:
                item = self._inbox.get(timeout=max(0.0, next_step_s - time.perf_counter()))
            except queue.Empty:
                self._publish(list(self._rows.values()), is_prefill=False)
                next_step_s += self._step_s
                continue
            if item is None:
                return
            if isinstance(item, str):
                self._rows.pop(item, None)
            else:
                row = self._rows[item.request_id] = _Row(item)
                self._publish([row], is_prefill=True)

    def _publish(self, rows: list[_Row], is_prefill: bool) -> None:
        text = FIRST_TEXT if is_prefill else stamp(time.perf_counter())
        token_ids = [self._token_ids[character] for character in text]
        chunks: dict[str, list[TokenChunk]] = {}
        for row in rows:
            chunk = self._chunk(row, token_ids, is_prefill)
            chunks.setdefault(row.request.frame_address, []).append(chunk)
        if chunks:
            self._sink.publish(chunks)

    def _chunk(self, row: _Row, token_ids: list[int], is_prefill: bool) -> TokenChunk:
        request, num_before = row.request, row.num_tokens
        new_ids = token_ids[: request.max_tokens - num_before]
        row.num_tokens += len(new_ids)
        is_last = row.num_tokens >= request.max_tokens
        if is_last:
            del self._rows[request.request_id]
        return TokenChunk(
            request.request_id,
            new_ids,
            FinishReason.LENGTH if is_last else None,
            None if is_prefill else CycleStats(7, len(new_ids) - 1, len(new_ids), 1.0, 2.0, 0.5),
            num_cached_tokens=0 if is_prefill else None,
            num_before=num_before,
        )


def character_tokens(target_path: str) -> dict[str, int]:
    """Return the token of every printable ASCII character that has one of its own."""
    vocabulary = Tokenizer.from_file(str(Path(target_path) / "tokenizer.json")).get_vocab()
    return {token: token_id for token, token_id in vocabulary.items() if len(token) == 1}


class PacedCoordinator:
    """A ``CoordinatorDeployment`` over a ``PacedEngine``; calls, frames and endings are the real one's."""

    def __init__(self, target_path: str, step_s: float) -> None:
        self._sink = CompletionSink()
        self._engine = PacedEngine(self._sink, character_tokens(target_path), step_s)
        self._sink.cancel = self._engine.cancel
        self._thread = threading.Thread(target=self._engine.run_forever, name="pace", daemon=True)
        self._thread.start()

    async def generate(self, frame: bytes, work: int = 0, prefix: bytes = b"") -> None:
        """See ``CoordinatorDeployment.generate``; there is one group, so the router's hints say nothing."""
        request = decode_request(frame)
        ended = self._sink.register(request)
        try:
            self._engine.submit(request)
            await ended.wait()
        except asyncio.CancelledError:
            self._engine.cancel(request.request_id)
            raise
        finally:
            self._sink.forget(request.request_id)

    async def check_ready(self) -> None:
        """There is nothing that could be lost."""

    def __del__(self) -> None:
        """Called by Serve on shutdown."""
        self._engine.close()
        self._thread.join(timeout=10)
