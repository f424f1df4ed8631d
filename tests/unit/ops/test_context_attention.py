"""All forms of attention over the packed context give what a dense softmax does; who does not is refused."""

from __future__ import annotations

import inspect
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_helpers import (
    HEAD_DIM,
    LAYER,
    NUM_KV_HEADS,
    SCALE,
    dense_row,
    forget_the_rest,
    make_pool,
    make_row,
    random_rows,
)
from torch import Tensor
from varlen_reference import AuxRequest, first_varlen_attn, paged_varlen_attn

from dflash_ops import context_attention
from dflash_ops.attention import AttentionRow, Reach, Visible, attend_packed, plan_attention
from dflash_ops.context_attention import (
    ContextAttention,
    GatheredKernel,
    PagedKernel,
    PlainContext,
    VarlenCall,
    choose_context_attention,
    varlen_call,
    why_not,
)
from dflash_ops.packed_context import PackedContext
from dflash_ops.paging import PoolLayout

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
SIZES = (4, NUM_KV_HEADS, HEAD_DIM, 4)


def call_of(function: Any) -> VarlenCall:
    arguments = frozenset(inspect.signature(function).parameters)
    return VarlenCall(function, AuxRequest(lse=True), arguments)


FORMS: list[ContextAttention] = [
    PlainContext(),
    GatheredKernel(call_of(first_varlen_attn)),
    GatheredKernel(call_of(paged_varlen_attn)),
    PagedKernel(call_of(paged_varlen_attn)),
]
IDS = ["plain", "gathered-first", "gathered", "paged"]


def check(
    rows: list[AttentionRow],
    heads_per_kv: int,
    form: ContextAttention,
    knows_total: bool = True,
    sinks: Tensor | None = None,
) -> Tensor:
    pool = make_pool(PoolLayout.BY_PAGE)
    forget_the_rest(pool, rows)
    total = sum(row.width for row in rows)
    query = torch.randn(total, NUM_KV_HEADS * heads_per_kv, HEAD_DIM)
    step_kv = torch.randn(total, 2, NUM_KV_HEADS, HEAD_DIM)
    step = plan_attention(rows, heads_per_kv, pool, form=form)
    if not knows_total and step.context is not None:
        step.context.total = None
    attended = attend_packed(query, step_kv, step, LAYER, SCALE, sinks)
    if sinks is None:
        for row in rows:
            expected = dense_row(row, query, step_kv[:, 0], step_kv[:, 1], pool.data[LAYER])
            actual = attended[row.offset : row.offset + row.width]
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    return attended


@pytest.mark.parametrize("form", FORMS, ids=IDS)
@pytest.mark.parametrize("knows_total", [True, False])
@pytest.mark.parametrize("heads_per_kv", [1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_ragged_rows(
    seed: int, heads_per_kv: int, knows_total: bool, form: ContextAttention
) -> None:
    check(random_rows(seed), heads_per_kv, form, knows_total)


@pytest.mark.parametrize("form", FORMS, ids=IDS)
@pytest.mark.parametrize("context", [0, 1, 4, 9])
def test_one_row(context: int, form: ContextAttention) -> None:
    torch.manual_seed(context)
    check([make_row(0, 5, context, Visible.CAUSAL)], 2, form)


@pytest.mark.parametrize("form", FORMS, ids=IDS)
def test_sinks_and_rows_of_many_widths_equal_the_row_by_row_form(form: ContextAttention) -> None:
    """Groups (narrow rows, and a chunk of a prompt) take their share of what was attended apart."""
    torch.manual_seed(0)
    rows = [make_row(0, 3, 9, Visible.CAUSAL), make_row(3, 40, 6, Visible.CAUSAL)]
    rows.append(make_row(43, 2, 0, Visible.CAUSAL))
    sinks = torch.randn(2 * NUM_KV_HEADS)
    torch.manual_seed(5)
    mine = check(rows, 2, form, sinks=sinks)
    torch.manual_seed(5)
    pool = make_pool()
    forget_the_rest(pool, rows)
    query = torch.randn(45, 2 * NUM_KV_HEADS, HEAD_DIM)
    step_kv = torch.randn(45, 2, NUM_KV_HEADS, HEAD_DIM)
    step = plan_attention(rows, 2, pool)
    torch.testing.assert_close(
        mine, attend_packed(query, step_kv, step, LAYER, SCALE, sinks), atol=1e-5, rtol=1e-5
    )


def test_layers_with_a_window_read_rows_one_by_one() -> None:
    torch.manual_seed(1)
    rows = [make_row(0, 3, 11, Visible.CAUSAL), make_row(3, 2, 4, Visible.CAUSAL)]
    reaches = [Reach(window=5), Reach()]
    query, step_kv = torch.randn(5, 4, HEAD_DIM), torch.randn(5, 2, NUM_KV_HEADS, HEAD_DIM)
    results = []
    for form in (None, PlainContext()):
        layout = PoolLayout.BY_HEAD if form is None else PoolLayout.BY_PAGE
        pool = make_pool(layout)
        pool.data.copy_(torch.randn(pool.data.shape, generator=torch.Generator().manual_seed(3)))
        step = plan_attention(rows, 2, pool, reaches, form)
        results.append([attend_packed(query, step_kv, step, i, SCALE) for i in (0, 1)])
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS, ids=IDS)
@pytest.mark.parametrize("sizes", [SIZES, (6, 2, 8, 4), (3, 1, 8, 1)])
def test_forms_pass_their_trial(form: ContextAttention, sizes: tuple[int, int, int, int]) -> None:
    assert why_not(form, CPU, torch.float32, *sizes) is None


class Wrong:
    """Right but for one thing."""

    name = "a form that is wrong"

    def __init__(self, fault: str) -> None:
        self._fault = fault

    def __call__(
        self, query: Tensor, layer_idx: int, context: PackedContext, scale: float
    ) -> tuple[Tensor, Tensor]:
        if self._fault == "raises":
            raise RuntimeError("page size must be divisible by 256\nand more")
        if self._fault == "reads too much":
            context = replace(context, lengths=(context.lengths * 2).clamp(max=context.capacity))
        out, weight = PlainContext()(query, layer_idx, context, scale)
        if self._fault == "lets empty rows weigh":
            weight = weight.nan_to_num(neginf=0.0)
        return out, weight.T if self._fault == "heads first" else weight


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raises", "RuntimeError: page size must be divisible by 256"),
        ("reads too much", "its output differs from the reference"),
        ("lets empty rows weigh", "its log-sum-exp differs from the reference"),
        ("heads first", "its log-sum-exp differs from the reference"),
    ],
)
def test_a_wrong_form_fails_its_trial(fault: str, reason: str) -> None:
    assert why_not(Wrong(fault), CPU, torch.float32, *SIZES) == reason


def test_cpus_read_contexts_where_they_lie() -> None:
    assert choose_context_attention(CPU, torch.float32, *SIZES) is None


@pytest.mark.parametrize(
    ("function", "broken", "expected"),
    [
        (paged_varlen_attn, (), PagedKernel),
        (paged_varlen_attn, ("PagedKernel",), GatheredKernel),
        (first_varlen_attn, (), GatheredKernel),
        (paged_varlen_attn, ("PagedKernel", "GatheredKernel"), PlainContext),
        (None, (), PlainContext),
    ],
)
def test_the_fastest_form_that_works_is_chosen_and_logged(
    function: Any,
    broken: tuple[str, ...],
    expected: type,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def tried(candidate: ContextAttention, *_: Any) -> str | None:
        return "it is broken" if type(candidate).__name__ in broken else None

    monkeypatch.setattr(context_attention, "varlen_call", lambda: function and call_of(function))
    monkeypatch.setattr(context_attention, "why_not", tried)
    with caplog.at_level(logging.INFO):
        chosen = choose_context_attention(torch.device("cuda"), torch.bfloat16, *SIZES)
    assert type(chosen) is expected
    assert expected.name in caplog.text
    assert caplog.text.count("it is broken") == len(broken)


def test_the_installed_torch_is_understood() -> None:
    """Its signature has what we pass; the kernel itself needs a GPU."""
    call = varlen_call()
    assert call is not None
    assert {"scale", "return_aux"} <= call.arguments
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
        assert call.has_pages


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("page_size", [16, 256])
def test_a_form_works_on_this_gpu(page_size: int) -> None:
    device = torch.device("cuda")
    chosen = choose_context_attention(device, torch.bfloat16, 32, 8, 128, page_size)
    assert chosen is not None
    assert why_not(chosen, device, torch.bfloat16, 32, 8, 128, page_size) is None
