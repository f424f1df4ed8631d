"""The seams of the system, as protocols. Fakes of these drive the tests.

``StepRing`` and ``TokenSink`` are the coordinator's two ports; ``EnginePort`` is the gateway's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from dflash_wire.drafters import DrafterLimits, default_drafter
from dflash_wire.gauges import GroupGauges
from dflash_wire.records import (
    GenerationRequest,
    StepPlan,
    StepRecord,
    StepResult,
    TokenChunk,
)

MAX_TREE_POSITIONS = 64
"""Largest tree that a policy may ask for, anchor included."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine group can hold; fixed at start."""

    num_pages: int
    page_size: int
    max_step_positions: int
    """Packed positions per step, prefill included; the FeaturePool has twice as many rows."""
    max_rows: int
    max_context: int
    """Longest sequence, prompt plus output, in tokens."""
    max_draft_block_size: int
    """The widest of its drafters' trained block sizes, anchor included."""
    drafters: tuple[DrafterLimits, ...] = ()
    """In the order of their indices; empty stands for the default drafter alone."""

    @property
    def all_drafters(self) -> tuple[DrafterLimits, ...]:
        """``drafters``, never empty."""
        return self.drafters or default_drafter(self.max_draft_block_size)

    @property
    def max_tree_positions(self) -> int:
        """Largest tree that a step holds, anchor included."""
        return min(MAX_TREE_POSITIONS, self.max_step_positions)


class StepRing(Protocol):
    """The way to drafter and verifier and back. Every executor runs steps in the order they were sent."""

    def send(self, plan: StepPlan) -> None:
        """Send ``plan`` on its way; never blocks.

        Raises:
            EngineUnavailableError: an executor is gone or takes no messages.
            ExecutorsReplacedError: all executors are new; nothing that was sent will be answered.
        """

    def receive(self, step_id: int) -> StepResult:
        """Wait for the result of a step that was sent; results of earlier steps are dropped.

        Raises:
            EngineUnavailableError: an executor is gone or does not answer.
            ExecutorsReplacedError: all executors are new; nothing that was sent will be answered.
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

    async def recorded_steps(self) -> list[list[StepRecord]]:
        """Return the latest steps of every verifier whose group answers; for traces."""

    async def gauges(self) -> list[GroupGauges]:
        """Return what every engine group that answers holds now; for metrics, not per request."""

    async def decisions(self, most: int) -> dict[str, list[str]]:
        """Return the block schedulers' latest decisions in words, newest last.

        Args:
            most: lines per scheduler.

        Returns:
            by ``group/lane``.
        """

    async def set_policy(self, policy: str) -> int:
        """Make ``policy`` the default of every engine group, for running requests that named none as well.

        Returns:
            how many groups have it now.

        Raises:
            InvalidRequestError: no such policy, or the drafters cannot follow it.
            EngineUnavailableError: no group answers.
        """
