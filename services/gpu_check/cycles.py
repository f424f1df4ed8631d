"""A whole cycle with the host in it, and what it would yield."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dflash_wire.records import DraftResult
from services.gpu_check.floors import floor_of
from services.gpu_check.pair import INGESTED
from services.gpu_check.report import PartResult
from services.gpu_check.session import NotHereError, Session
from verifier.packing import pack_rows
from verifier.static_verify import acceptance_of, static_row

CYCLE_BOUND = 1.3
PUBLISHED_TAU = {"MT-Bench": 4.1, "GSM8K": 6.2, "HumanEval": 6.3}
"""Acceptance lengths published for Qwen3-8B-DFlash-b16. Random weights accept next to nothing, so these are
imposed: tokens per second are what a cycle of the measured time would yield with them."""


def cycle(session: Session, width: int, rows: int, context: int) -> Callable[[], object]:
    """Ingest, draft and verify without the host in between; then the host reads what is committed.

    Positions stay where they are, whatever is committed: every cycle does the same.
    """
    pair = session.pair
    drafting, verifying = pair.drafter.static, pair.verifier.static
    assert drafting is not None and verifying is not None
    taken = min(INGESTED, context)
    plan = pair.plan(rows, width, context, num_ingested=taken)
    draft_bucket = drafting.bucket_of(plan.rows)
    blank = DraftResult(plan.step_id, [[0] * (width - 1) for _ in range(rows)])
    bucket = verifying.bucket_of(pack_rows(plan, blank))
    assert draft_bucket is not None and bucket is not None

    def run() -> list[list[int]]:
        packed = pack_rows(plan, blank)
        offsets = plan.feature_offsets()
        filled = [static_row(p, at, bucket.pages) for p, at in zip(packed, offsets, strict=True)]
        drafting.ingest(plan.ingests)
        drafts = drafting.launch(plan.rows, draft_bucket)
        lines: Sequence[list[int]] = verifying.launch(filled, bucket, drafts[:rows]).tolist()
        return [acceptance_of(line).token_ids for line in lines[:rows]]

    return run


@torch.inference_mode()
def cycles(session: Session, part: PartResult) -> None:
    """Cycles of the widest block at all numbers of rows."""
    shape, ceilings = session.shape, session.ceilings
    if ceilings is None:
        raise NotHereError("the card's ceilings are not known")
    width = shape.widths[-1]
    for context in shape.contexts:
        for rows in shape.rows:
            if not session.pair.has_room(rows, context):
                continue
            ms = session.wall_ms(cycle(session, width, rows, context))
            floors = [
                floor_of(session.pair, ceilings, name, width, rows, context)
                for name in ("verify", "draft")
            ]
            floor_ms = sum(floor.ms for floor in floors)
            implied = {
                f"tokens/s of {kind}, tau {tau:g} imposed": 1e3 * rows * tau / ms
                for kind, tau in PUBLISHED_TAU.items()
            }
            found = {"context": context, "rows": rows, "width": width, "cycle_ms": ms}
            part.add(**found, over_floors=ms / floor_ms, **implied)
            if (rows, context) == (shape.rows[0], shape.contexts[0]):
                name = f"cycle at {rows} stream, over the floors of verify and draft"
                part.aim(name, ms / floor_ms, CYCLE_BOUND, is_judged=session.is_cuda)
