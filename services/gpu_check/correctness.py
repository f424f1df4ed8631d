"""Do the kernels, the graphs and the way between processes give what they must?"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dflash_ops.context_attention import (
    TOLERANCE,
    ContextAttention,
    GatheredKernel,
    PagedKernel,
    PlainContext,
    varlen_call,
)
from dflash_ops.packed_context import PackedContext
from dflash_ops.paging import PagedPool, PoolLayout
from dflash_wire.records import DraftResult, StepPlan
from dflash_wire.sampling import SamplingParams
from services.gpu_check.report import PartResult
from services.gpu_check.session import Session

SAMPLED = SamplingParams(temperature=1.0, seed=7)


def kernels(session: Session, part: PartResult) -> None:
    """Every form of attention over context that this torch has, against basic operators in float32."""
    part.add(chosen=session.form.name, torch=torch.__version__)
    call = varlen_call()
    forms: list[ContextAttention] = [PlainContext()]
    if call is not None and session.is_cuda:
        forms.append(GatheredKernel(call))
        if call.has_pages:
            forms.append(PagedKernel(call))
    context, reference, query = _trial(session)
    scale = query.shape[-1] ** -0.5
    right = PlainContext()(query.float(), 0, reference, scale)
    for form in forms:
        session.check_time()
        try:
            found = form(query, 0, context, scale)
            out, weight = (_error(*pair) for pair in zip(found, right, strict=True))
        except RuntimeError as error:  # of sizes that the kernel does not take
            part.add(form=form.name, error=str(error).splitlines()[0])
            if form.name == session.form.name:
                raise
            continue
        part.add(form=form.name, output_error=out, weight_error=weight)
        if form.name == session.form.name:
            part.must(f"{form.name}: output, of the largest", out, TOLERANCE)
            part.must(f"{form.name}: log-sum-exp, of the largest", weight, TOLERANCE)


def _trial(session: Session) -> tuple[PackedContext, PackedContext, Tensor]:
    """Rows of all contexts and some odd ones, one without any; the same in float32; and queries."""
    shape, device = session.shape, session.device
    config, size, width = shape.target, shape.page_size, shape.widths[-1]
    lengths = [0, 1, size, size + 1, *shape.contexts, shape.contexts[-1] - 1]
    num_pages = [-(-length // size) for length in lengths]
    heads, dim = config["num_key_value_heads"], config["head_dim"]
    generator = torch.Generator(device).manual_seed(3)
    pools = [
        PagedPool(1, sum(num_pages) + 1, size, heads, dim, t, device, PoolLayout.BY_PAGE)
        for t in (session.dtype, torch.float32)
    ]
    pools[0].data.normal_(generator=generator)
    pools[1].data.copy_(pools[0].data)
    order = torch.randperm(sum(num_pages) + 1, generator=torch.Generator().manual_seed(3))
    table = torch.zeros(len(lengths), max(num_pages), dtype=torch.int32)
    taken = 0
    for row, count in enumerate(num_pages):
        table[row, :count] = order[taken : taken + count]
        taken += count
    num_queries = len(lengths) * width
    starts = torch.arange(0, num_queries + 1, width, dtype=torch.int32, device=device)
    known = torch.tensor(lengths, dtype=torch.int32, device=device)
    contexts = [
        PackedContext(pool, starts, width, table.to(device), known, sum(lengths)) for pool in pools
    ]
    query = torch.randn(
        num_queries, config["num_attention_heads"], dim, generator=generator, device=device
    )
    return contexts[0], contexts[1], query.to(session.dtype)


def _error(found: Tensor, right: Tensor) -> float:
    """The largest difference as a share of the largest value; 1 if what is infinite is not so in both."""
    found = found.float()
    is_finite = right.isfinite()
    if not torch.equal(is_finite, found.isfinite()):
        return 1.0
    found, right = found[is_finite], right[is_finite]
    return float((found - right).abs().max() / right.abs().max())


def graphs(session: Session, part: PartResult) -> None:
    """A captured pass against the same one uncaptured, and against packed rows as a CPU runs them."""
    pair, shape = session.pair, session.shape
    for rows in dict.fromkeys((shape.rows[0], shape.rows[1])):
        for sampling in (SamplingParams(), SAMPLED):
            session.check_time()
            plan = pair.plan(rows, shape.widths[-1], shape.contexts[0], sampling=sampling)
            _compare(session, part, plan)
    memory = {"verify": pair.verifier.static, "draft": pair.drafter.static}
    for name, static in memory.items():
        assert static is not None
        part.add(graphs_of=name, held=str(static.passes.memory))
        if session.is_cuda:
            part.must(f"{name} passes left uncaptured", static.passes.memory.num_plain, 0)


@torch.inference_mode()
def _compare(session: Session, part: PartResult, plan: StepPlan) -> None:
    """One step three ways; what it writes is the same each time, so its order does not matter."""
    pair = session.pair
    verifier, drafter = pair.verifier, pair.drafter
    verifying, drafting = verifier.static, drafter.static
    assert verifying is not None and drafting is not None
    drafts = drafter.run(plan)
    drafter.static = None
    packed_drafts = drafter.run(plan)
    drafter.static = drafting
    mine = _verified(session, plan, drafts)
    verifying.passes.is_replaying = False
    uncaptured = _verified(session, plan, drafts)
    verifying.passes.is_replaying = True
    verifier.static = None
    packed = _verified(session, plan, drafts)
    verifier.static = verifying
    row = plan.rows[0]
    name = f"{len(plan.rows)} x {row.width}, temperature {row.sampling.temperature:g}"
    part.must(f"{name}: captured, from uncaptured", _distance(mine, uncaptured), 0.0)
    part.must(f"{name}: packed rows, from captured", _distance(packed, mine), _bound(session))
    agreeing = _share_equal(drafts.draft_token_ids, packed_drafts.draft_token_ids)
    # In 16 bits near ties of random weights may fall either way.
    part.must(f"{name}: share of drafts that differ", 1 - agreeing, 0.5 if session.is_cuda else 0.0)


def _bound(session: Session) -> float:
    return 2.0**-4 if session.dtype != torch.float32 else 1e-4


def _verified(session: Session, plan: StepPlan, drafts: DraftResult) -> Tensor:
    """The anchors' features ``[R, K*H]`` that a step wrote; drafts may not be kept, anchors always are."""
    pair = session.pair
    pair.verifier.run(plan, drafts)
    session.settle()
    places = torch.tensor(list(plan.feature_offsets()), device=session.device)
    return pair.features[places].float()


def _distance(found: Tensor, right: Tensor) -> float:
    """The difference's norm as a share of the right features'; 1 if that is no number."""
    share = float((found - right).norm() / right.norm())
    return share if math.isfinite(share) else 1.0


def _share_equal(mine: list[list[int]], others: list[list[int]]) -> float:
    pairs = [(a, b) for x, y in zip(mine, others, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(a == b for a, b in pairs) / max(1, len(pairs))
