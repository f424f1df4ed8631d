"""What a step has for the gateways, until the sink has taken it."""

from __future__ import annotations

import logging

from dflash_wire.errors import EngineUnavailableError, FatalError, error_to_wire
from dflash_wire.ports import TokenSink
from dflash_wire.records import TokenChunk
from gateway.coordinator.sequence import Sequence

logger = logging.getLogger(__name__)


class Outbox:
    """Chunks of one step. Owner: the coordinator; the driver thread alone calls it."""

    def __init__(self, sink: TokenSink) -> None:
        self._sink = sink
        self._chunks: list[tuple[Sequence, TokenChunk]] = []
        self.last_error: str | None = None
        """What the sink failed with last."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to publish."""
        return not self._chunks

    def add(self, sequence: Sequence, chunk: TokenChunk) -> None:
        """Add a chunk of a sequence. Mutates."""
        self._chunks.append((sequence, chunk))

    def publish(self) -> list[Sequence]:
        """Empty the outbox into the sink; return whose chunks the sink refused. Mutates.

        A request cancelled during the step still commits: its chunk stops here, and the next step
        frees its pages before planning.
        """
        chunks, self._chunks = self._chunks, []
        by_address: dict[str, list[TokenChunk]] = {}
        for sequence, chunk in chunks:
            if not sequence.is_cancelled:
                by_address.setdefault(sequence.request.frame_address, []).append(chunk)
        if not by_address:
            return []
        try:
            self._sink.publish(by_address)
        except Exception as error:
            logger.exception("the token sink failed")
            self.last_error = f"{type(error).__name__}: {error}"
            return [sequence for sequence, _ in chunks]
        return []


def introduce(chunk: TokenChunk, sequence: Sequence, policy: str) -> None:
    """Add what only a request's first chunk says. Mutates ``chunk``."""
    chunk.num_cached_tokens = sequence.num_prefix_tokens
    chunk.policy = policy
    if sequence.request.num_prompt_logprobs is not None:
        chunk.prompt_logprobs = sequence.prompt_logprobs


def engine_error(error: Exception) -> dict[str, str | None]:
    """Return the wire form of what went wrong: unavailable engines may be retried, the rest not.

    That executors were replaced is no reason to end a request, unless it comes along each time.
    """
    if isinstance(error, EngineUnavailableError | FatalError):
        return error_to_wire(error)
    return error_to_wire(FatalError(str(error_to_wire(error)["message"])))
