"""How long passes take, beside what the card could do at best."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch

from dflash_ops.sampling import SamplingRun
from dflash_wire.records import DraftResult
from dflash_wire.sampling import SamplingParams
from drafter.tree import grow_trees
from services.gpu_check.floors import floor_of
from services.gpu_check.report import PartResult
from services.gpu_check.session import Ceilings, NotHereError, Session
from verifier.packing import pack_rows
from verifier.static_verify import static_row

VERIFY_BOUND, DRAFT_BOUND = 1.25, 1.5
FLAT_BOUND = 1.1
FLAT_FROM = 4
"""Width from which a draft pass should take as long as the widest."""
TREE_NODES = 64


def ceilings(session: Session, part: PartResult) -> None:
    """A large copy, and a large product of random numbers in the pair's type."""
    shape, device = session.shape, session.device
    source, target = torch.ones(2, shape.copy_bytes, dtype=torch.uint8, device=device)
    copy_ms = session.device_ms(partial(target.copy_, source))
    side = shape.matmul_size
    a, b = torch.randn(2, side, side, device=device).to(session.dtype)
    product_ms = session.device_ms(partial(torch.matmul, a, b))
    found = Ceilings(2 * shape.copy_bytes / copy_ms, 2 * side**3 / product_ms)
    session.ceilings = found
    part.add(what="copy, read and written", tb_per_s=found.bytes_per_ms / 1e9)
    part.add(what=f"{shape.dtype} product, {side} wide", tflop_per_s=found.flops_per_ms / 1e9)


def verify_passes(session: Session, part: PartResult) -> None:
    """The verify pass: target, choice, acceptance and commit."""
    _grid(session, part, "verify", verify_launch, session.shape.widths)
    width = session.shape.widths[-1]
    _aim_at_floor(session, part, "verify", width, VERIFY_BOUND)


def draft_passes(session: Session, part: PartResult) -> None:
    """The draft pass: layers, head and choice."""
    widths = tuple(width for width in session.shape.widths if width > 1)
    _grid(session, part, "draft", draft_launch, widths)
    _aim_at_floor(session, part, "draft", widths[-1], DRAFT_BOUND)
    row, context = session.shape.rows[0], session.shape.contexts[0]
    narrow = min((width for width in widths if width >= FLAT_FROM), default=widths[-1])
    times = [session.times.get(("draft", width, row, context)) for width in (narrow, widths[-1])]
    if times[0] is not None and times[1] is not None:
        name = f"draft time of width {widths[-1]} over width {narrow}"
        part.aim(name, times[1] / times[0], FLAT_BOUND, is_judged=session.is_cuda)


Launch = Callable[[Session, int, int, int], Callable[[], object]]


def verify_launch(session: Session, width: int, rows: int, context: int) -> Callable[[], object]:
    """What gives the device one verify pass."""
    static, plan = session.pair.verifier.static, session.pair.plan(rows, width, context)
    assert static is not None
    drafts = [[5] * (width - 1) for _ in range(rows)]
    packed = pack_rows(plan, DraftResult(plan.step_id, drafts))
    bucket = static.bucket_of(packed)
    assert bucket is not None
    offsets = plan.feature_offsets()
    filled = [static_row(p, at, bucket.pages) for p, at in zip(packed, offsets, strict=True)]
    return lambda: static.launch(filled, bucket)


def draft_launch(session: Session, width: int, rows: int, context: int) -> Callable[[], object]:
    """What gives the device one draft pass."""
    static, plan = session.pair.drafter.static, session.pair.plan(rows, width, context)
    assert static is not None
    bucket = static.bucket_of(plan.rows)
    assert bucket is not None
    return lambda: static.launch(plan.rows, bucket)


@torch.inference_mode()
def _grid(
    session: Session, part: PartResult, name: str, launch: Launch, widths: tuple[int, ...]
) -> None:
    """Measure all sizes, the smallest first, so that a run that is cut off has those that matter most."""
    shape, pair = session.shape, session.pair
    if session.ceilings is None:
        raise NotHereError("the card's ceilings are not known")
    for context, rows, width in itertools.product(shape.contexts, shape.rows, widths):
        if not pair.has_room(rows, context):
            part.add(context=context, rows=rows, width=width, left_out="the pools are too small")
            continue
        ms = session.device_ms(launch(session, width, rows, context))
        session.times[name, width, rows, context] = ms
        floor = floor_of(pair, session.ceilings, name, width, rows, context)
        part.add(
            context=context,
            rows=rows,
            width=width,
            ms=ms,
            bytes_floor_ms=floor.bytes_ms,
            flops_floor_ms=floor.flops_ms,
            over_floor=ms / floor.ms,
        )


def _aim_at_floor(session: Session, part: PartResult, name: str, width: int, bound: float) -> None:
    rows, context = session.shape.rows[0], session.shape.contexts[0]
    ms = session.times.get((name, width, rows, context))
    if ms is None or session.ceilings is None:
        return
    floor = floor_of(session.pair, session.ceilings, name, width, rows, context)
    what = f"{name} pass of {width} tokens, {rows} stream, over its bandwidth floor"
    part.aim(what, ms / floor.bytes_ms, bound, is_judged=session.is_cuda)


@torch.inference_mode()
def without_graphs(session: Session, part: PartResult) -> None:
    """The same passes uncaptured, at the sizes where launches weigh most."""
    if not session.is_cuda:
        raise NotHereError("on a CPU nothing is captured")
    shape, pair = session.shape, session.pair
    width, context = shape.widths[-1], shape.contexts[0]
    for name, launch, engine in (
        ("verify", verify_launch, pair.verifier),
        ("draft", draft_launch, pair.drafter),
    ):
        assert engine.static is not None
        for rows in shape.rows[:2]:
            run = launch(session, width, rows, context)
            captured = session.device_ms(run)
            engine.static.passes.is_replaying = False
            try:
                plain = session.device_ms(run)
            finally:
                engine.static.passes.is_replaying = True
            part.add(of=name, rows=rows, width=width, captured_ms=captured, uncaptured_ms=plain)


@torch.inference_mode()
def trees(session: Session, part: PartResult) -> None:
    """Growing trees out of a draft block's logits, host and all."""
    shape = session.shape
    slots, vocab_size = shape.widths[-1] - 1, shape.target["vocab_size"]
    for rows in shape.rows:
        logits = torch.randn(rows * slots, vocab_size, device=session.device).to(session.dtype)
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature)
            runs = [SamplingRun(i * slots, (i + 1) * slots, 100, params) for i in range(rows)]
            sizes = [TREE_NODES] * rows
            ms = session.wall_ms(partial(grow_trees, logits, runs, sizes))
            part.add(rows=rows, nodes=TREE_NODES, temperature=temperature, ms=ms)
