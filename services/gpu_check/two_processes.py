"""The drafter in a process of its own, as it is served, beside both in one.

Two plain processes: plans and drafts go over a pipe in the frames that the server uses, and the drafter maps
the verifier's features, by CUDA IPC on a card and by shared memory on a CPU. Ray and ZeroMQ, which do that in
the server, need not be installed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from torch import multiprocessing as mp

from dflash_wire.codec import decode_drafts, decode_plan, encode_drafts, encode_plan
from dflash_wire.records import DraftResult, StepPlan
from drafter.borrowed import BorrowedWeights
from services.gpu_check.pair import INGESTED, drafter_engine, random_drafter
from services.gpu_check.report import PartResult
from services.gpu_check.session import NotHereError, Session
from services.gpu_check.shapes import Shape

DIGEST = b"digest"
READY = b"ready"
PATIENCE_S = 90.0
"""How long the other process may take for anything."""
NUM_STEPS = 3


def digest(features: Tensor) -> bytes:
    """What tells two pools' contents apart, to the last bit."""
    return hashlib.sha256(features.cpu().contiguous().view(torch.uint8).numpy().data).digest()


def drafter_process(
    pipe: Connection,
    shape: Shape,
    num_pages: int,
    features: Tensor,
    borrowed: tuple[Tensor, Tensor],
) -> None:
    """The other process: takes plans, gives drafts, until the pipe says nothing."""
    session = Session(shape, features.device, PATIENCE_S)
    if not session.is_cuda:
        torch.set_num_threads(1)
    model = random_drafter(shape, session.device)
    engine = drafter_engine(
        shape, model, BorrowedWeights(*borrowed), features, num_pages, session.form
    )
    pipe.send_bytes(READY)
    while message := pipe.recv_bytes():
        if message == DIGEST:
            pipe.send_bytes(digest(features))
            continue
        drafts = engine.run(decode_plan(message))
        session.settle()
        pipe.send_bytes(encode_drafts(drafts))


class OtherProcess:
    """This process's end of it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def ask(self, message: bytes) -> bytes:
        """Send a message and wait for what comes back.

        Raises:
            RuntimeError: nothing came.
        """
        self._pipe.send_bytes(message)
        return self.receive()

    def receive(self) -> bytes:
        """Wait for a message."""
        try:
            if self._pipe.poll(PATIENCE_S):
                return self._pipe.recv_bytes()
        except EOFError as error:
            raise RuntimeError("the drafter's process ended; its output says why") from error
        raise RuntimeError(f"the drafter's process said nothing for {PATIENCE_S:g} s")

    def draft(self, plan: StepPlan) -> DraftResult:
        """Have a step drafted."""
        return decode_drafts(self.ask(encode_plan(plan)))


@contextmanager
def other_process(session: Session, num_pages: int) -> Iterator[OtherProcess]:
    """Start it, and end it whatever happens."""
    context = mp.get_context("spawn")
    pipe, theirs = context.Pipe()
    pair = session.pair
    tensors = pair.borrowed.embedding, pair.borrowed.head
    arguments = (theirs, session.shape, num_pages, pair.features, tensors)
    process = context.Process(target=drafter_process, args=arguments, daemon=True)
    process.start()
    theirs.close()
    other = OtherProcess(pipe)
    try:
        other.receive()
        yield other
    finally:
        with suppress(OSError):  # it is gone already
            pipe.send_bytes(b"")
        process.join(10)
        if process.is_alive():
            process.kill()


def two_processes(session: Session, part: PartResult) -> None:
    """Features must arrive as they were written; then what a cycle costs more than in one process."""
    shape, pair = session.shape, session.pair
    width, context = shape.widths[-1], shape.contexts[0]
    counts = [rows for rows in shape.rows[:3] if pair.has_room(rows, context)]
    num_pages = counts[-1] * shape.pages_of(context)
    with other_process(session, num_pages) as other:
        for step in range(NUM_STEPS):
            plan = pair.plan(shape.rows[0], width, context, step_id=step, num_pages=num_pages)
            pair.features.normal_()
            pair.verifier.run(plan, other.draft(plan))
            session.settle()
            is_equal = other.ask(DIGEST) == digest(pair.features)
            part.must(f"features of step {step} that differ", float(not is_equal), 0.0)
        for rows in counts:
            taken = min(INGESTED, context)
            plan = pair.plan(rows, width, context, num_ingested=taken, num_pages=num_pages)
            one = session.wall_ms(partial(_step, session, plan, pair.drafter))
            two = session.wall_ms(partial(_step, session, plan, other))
            part.add(
                rows=rows, width=width, one_process_ms=one, two_processes_ms=two, added_ms=two - one
            )


def _step(session: Session, plan: StepPlan, drafter: Any) -> None:
    drafts = drafter.draft(plan) if isinstance(drafter, OtherProcess) else drafter.run(plan)
    session.pair.verifier.run(plan, drafts)
    session.settle()


def ray_features(session: Session, part: PartResult) -> None:
    """The FeaturePool over Ray's direct transport, between two actors on this card."""
    if find_spec("ray") is None:
        raise NotHereError("Ray is not installed")
    if not session.is_cuda:
        raise NotHereError("tests/serve does this on a CPU")
    from services.gpu_check.ray_actors import differing_reads

    part.must("reads over Ray's CUDA IPC that differ", differing_reads(session.dtype), 0.0)
