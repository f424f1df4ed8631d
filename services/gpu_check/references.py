"""Other loops over the same weights: transformers' ``generate``, and the public ``dflash`` package's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from dflash_ops.attention import GATHERED
from services.gpu_check.pair import random_drafter
from services.gpu_check.report import PartResult
from services.gpu_check.session import NotHereError, Session


def hf_generate(session: Session, part: PartResult) -> None:
    """Greedy ``generate``: plain decoding, one stream."""
    with reference_target(session) as (target, prompt):

        def run(count: int) -> None:
            target.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
            session.settle()

        count = session.shape.reference_tokens
        first, whole = seconds_of(session, run, 1), seconds_of(session, run, count)
    ms = 1e3 * (whole - first) / (count - 1)
    part.add(loop="transformers generate", context=prompt.shape[1], ms_per_token=ms)
    add_ours(session, part)


def dflash_package(session: Session, part: PartResult) -> None:
    """The package's loop with its own draft model on the same weights; a cycle commits about one token."""
    if find_spec("dflash") is None:
        raise NotHereError("the dflash package is not installed")
    from dflash import model as package

    if not session.is_cuda:  # it times with CUDA events
        package._cuda_time = time.perf_counter
    drafter: Any = package.DFlashDraftModel(session.shape.draft_config())
    drafter.load_state_dict(random_drafter(session.shape, session.device).state_dict())
    drafter = drafter.to(session.device, session.dtype).eval()
    lengths: list[int] = []
    with reference_target(session) as (target, prompt):

        def run(count: int) -> None:
            found = package.dflash_generate(drafter, target, prompt, count, [], return_stats=True)
            lengths[:] = found.acceptance_lengths
            session.settle()

        first = seconds_of(session, run, 2)
        num_before = len(lengths)
        whole = seconds_of(session, run, session.shape.reference_tokens)
    cycles = len(lengths) - num_before
    ms = 1e3 * (whole - first) / cycles if cycles > 0 else None
    part.add(loop="dflash package", context=prompt.shape[1], ms_per_cycle=ms)
    add_ours(session, part)


def add_ours(session: Session, part: PartResult) -> None:
    """What a cycle's passes take here, where they have been measured."""
    shape = session.shape
    sizes = shape.widths[-1], shape.rows[0], shape.contexts[0]
    times = [session.times.get((name, *sizes)) for name in ("draft", "verify")]
    if times[0] is not None and times[1] is not None:
        part.add(loop="ours, draft and verify pass", ms_per_cycle=times[0] + times[1])
    plain = session.times.get(("verify", 1, *sizes[1:]))
    if plain is not None:
        part.add(loop="ours, plain decoding", ms_per_token=plain)


@contextmanager
def reference_target(session: Session) -> Iterator[tuple[Any, Tensor]]:
    """transformers' model of the pair's target with its own attention, and a prompt ``[1, C]`` int64."""
    model = session.pair.verifier.target.model
    context = session.shape.contexts[0]
    generator = torch.Generator().manual_seed(2)
    prompt = torch.randint(5, 100, (1, context), generator=generator).to(session.device)
    model.set_attn_implementation("sdpa")
    try:
        with torch.inference_mode():
            yield model, prompt
    finally:
        model.set_attn_implementation(GATHERED)


def seconds_of(session: Session, run: Callable[[int], None], count: int) -> float:
    """Time of generating so many tokens, prompt included; the second time."""
    session.check_time()
    run(1)
    began = time.perf_counter()
    run(count)
    return time.perf_counter() - began
