"""The seams of the system, as protocols. Fakes of these drive the tests.

``StepRing`` and ``TokenSink`` are the coordinator's two ports; ``EnginePort`` is the gateway's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from dflash_wire.records import (
    EngineGroupLoad,
    GenerationRequest,
    StepPlan,
    StepResult,
    TokenChunk,
)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine group can hold; fixed at start."""

    num_pages: int
    page_size: int
    max_step_positions: int
    """Packed positions per step, prefill included; also the FeaturePool's rows."""
    max_rows: int
    max_context: int
    """Longest sequence, prompt plus output, in tokens."""
    max_draft_block_size: int
    """The draft model's trained block size, anchor included."""


class StepRing(Protocol):
    """The way to drafter and verifier and back. One step is in flight at a time."""

    def run(self, plan: StepPlan) -> StepResult:
        """Send ``plan`` around the ring and wait for its result.

        Raises:
            EngineUnavailableError: an executor is gone or does not answer.
        """


class TokenSink(Protocol):
    """Where committed tokens leave the coordinator."""

    def publish(self, chunks: dict[str, list[TokenChunk]]) -> None:
        """Deliver one step's chunks, grouped by ``GenerationRequest.frame_address``. Never blocks."""


class EnginePort(Protocol):
    """What the gateway needs of an engine."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        """Yield chunks until one carries a finish reason.

        Closing the iterator early cancels the request and frees its pages within a step.

        Raises:
            DFlashError: the request was refused or the engine failed.
        """

    async def check_ready(self) -> None:
        """Return when the engine can serve.

        Raises:
            EngineUnavailableError: it can not, with the reason.
        """

    def group_loads(self) -> list[EngineGroupLoad]:
        """Return what the engine groups last said of their load; empty before the first word. Cheap."""
