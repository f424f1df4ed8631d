"""The embedded pair over static memory, as on a GPU but uncaptured: the tokens of plain decoding."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from local_engines import END_OF_SEQUENCE, Collector, build_engines, encoded_prompts, run

from dflash_ops.context_attention import PagedKernel, PlainContext, VarlenCall
from dflash_wire.records import GenerationRequest
from dflash_wire.sampling import SamplingParams
from drafter.engine import DrafterEngine
from gateway.coordinator import Coordinator
from services import attended_pools
from services.config import AppArgs
from services.spec import make_spec
from services.static_passes import static_sizes

Answers = dict[str, tuple[list[int], str | None]]


def answers(policy: str, *, over_static_memory: bool) -> Answers:
    ring, limits = build_engines(num_pages=200, max_rows=4, graph_memory_mib=64)
    drafter, verifier = ring.drafters[0], ring.verifier
    assert isinstance(drafter, DrafterEngine)
    assert (verifier.static is not None) is (drafter.static is not None) is over_static_memory
    sink = Collector()
    coordinator = Coordinator(ring, sink, limits, policy, cohorts=(1,))
    asked = [
        GenerationRequest(
            f"r{i}",
            prompt,
            20 + i,
            SamplingParams(temperature=(0.0, 1.0)[i % 2], top_k=(0, 0, 5)[i % 3], seed=100 + i),
            [END_OF_SEQUENCE],
        )
        for i, prompt in enumerate(encoded_prompts("word_problems")[:6])
    ]
    run(coordinator, asked, per_step=2)
    if verifier.static is not None and drafter.static is not None:
        assert verifier.static.passes.keys
        assert drafter.static.passes.keys or policy == "off"
    return {r.request_id: sink.answer(r.request_id) for r in asked}


@pytest.fixture(scope="module")
def plain() -> Answers:
    return answers("off", over_static_memory=False)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["off", "static:8", "static-tree:12"])
def test_tokens_equal_plain_decoding(
    plain: Answers, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attended_pools, "choose_context_attention", lambda *_: PlainContext())
    assert answers(policy, over_static_memory=True) == plain


@pytest.mark.unit
def test_no_memory_for_graphs_means_no_static_passes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attended_pools, "choose_context_attention", lambda *_: PlainContext())
    with caplog.at_level(logging.INFO):
        ring, _ = build_engines(num_pages=8)
    assert ring.verifier.static is None
    assert "verify passes run without CUDA graphs: engine.graph_memory_mib is 0" in caplog.text
    assert "draft passes run without CUDA graphs: engine.graph_memory_mib is 0" in caplog.text


@pytest.mark.unit
def test_sizes_follow_the_engine_and_the_kernel() -> None:
    args = AppArgs.model_validate({"engine": {"policy": "off"}})
    spec = replace(make_spec(args), max_rows=6, page_size=16, num_pages=2048, max_context=16384)
    spec = replace(spec, max_step_positions=48)
    copying = static_sizes(spec, 16, 8192, PlainContext())
    assert copying.pages == (16, 64, 256, 512)
    assert copying.rows == (1, 2, 3, 4, 6) and copying.most_tokens == 48
    call = VarlenCall(len, None, frozenset())
    assert static_sizes(spec, 16, 8192, PagedKernel(call)).pages == (512,)
