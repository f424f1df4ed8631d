"""One decision for all ranks of a split target.

Rank 0 is a ``VerifierEngine`` as without ranks: it applies processors, samples and accepts. Before its
pass it tells the others the step's rows with their final drafts, after it which of these stay; they run
the same pass over their share and write the same tokens' keys and values. A rank knows no sampling and no
sequences.

A pass that fails on one rank leaves the sums of the others waiting, and whatever came next would be added to
those. So from a failed pass on a rank refuses all others, and has to be replaced together with its group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from dflash_ops.attention import AttentionForm, StepAttention
from dflash_ops.paging import PagedPool
from dflash_wire.codec import (
    decode_drafts,
    decode_kept,
    decode_plan,
    encode_drafts,
    encode_kept,
    encode_plan,
)
from dflash_wire.errors import ExecutorLostError, FatalError
from dflash_wire.records import DraftResult, StepPlan
from verifier.packed_pass import PackedPass
from verifier.packing import PackedRow, pack_rows
from verifier.target import TargetModel

PASS, KEEP = b"P", b"K"

Message = list[bytes]


class RankLeader:
    """Rank 0's way to the others. Owner: its ``VerifierEngine``.

    Args:
        tell: sends a message to every other rank, in order; never blocks.
    """

    def __init__(self, tell: Callable[[Message], None]) -> None:
        self._tell = tell
        self.is_broken = False
        """A pass has failed: no other may follow."""

    @contextmanager
    def joint_pass(self, step_id: int, packed: list[PackedRow]) -> Iterator[None]:
        """Have the others run the pass that the caller runs inside this context. Mutates ``is_broken``.

        Raises:
            ExecutorLostError: an earlier pass failed.
        """
        if self.is_broken:
            raise ExecutorLostError("a rank of the target was lost; all are being replaced")
        try:
            self._tell([PASS, *encoded_pass(step_id, packed)])
            yield
        except BaseException:
            self.is_broken = True
            raise

    def keep(self, step_id: int, kept: list[list[int]]) -> None:
        """Tell the others which packed tokens of a step's rows stay.

        Raises:
            EngineUnavailableError: a rank takes no messages.
        """
        self._tell([KEEP, encode_kept(step_id, kept)])


def encoded_pass(step_id: int, packed: list[PackedRow]) -> Message:
    """What a rank must know of a pass, as the frames of a plan and of drafts."""
    rows = [replace(p.row, extras=None) for p in packed]
    drafts = DraftResult(step_id, [p.draft_token_ids for p in packed])
    if not all(p.is_chain for p in packed):
        drafts.parents = [[] if p.is_chain else p.parents for p in packed]
    return [encode_plan(StepPlan(step_id, rows)), encode_drafts(drafts)]


class RankEngine:
    """Runs a rank's share of the passes that rank 0 tells it about.

    Owner of its KV pool, which holds the same tokens as rank 0's under the same pages.

    Args:
        target: this rank's share.
        pool: its KV pool.
        form: of attention over ``pool``; None: row by row.
    """

    def __init__(
        self, target: TargetModel, pool: PagedPool, form: AttentionForm | None = None
    ) -> None:
        self.pool = pool
        self._pass = PackedPass(target, pool, form)
        self._running: tuple[int, list[PackedRow], StepAttention] | None = None

    @torch.inference_mode()
    def handle(self, message: Message) -> None:
        """Run a pass, or keep what rank 0 kept of the last one. Mutates the pool.

        Raises:
            FatalError: the message does not follow the last one.
            ExecutorLostError: another rank is gone.
        """
        kind, *frames = message
        if kind == PASS:
            plan = decode_plan(frames[0])
            packed = pack_rows(plan, decode_drafts(frames[1]))
            # Of a step that rank 0 gave up behind its pass, nothing stays.
            self._running = plan.step_id, packed, self._pass.run(packed, []).step
            return
        step_id, kept = decode_kept(frames[0])
        if kind != KEEP or self._running is None or self._running[0] != step_id:
            raise FatalError(f"rank 0 keeps tokens of step {step_id}, which is not the last one")
        _, packed, step = self._running
        self._running = None
        slots = self._pass.slots(packed, kept)
        self._pass.keep(step, self._pass.index_of(kept), slots)
