"""Every target family against transformers: tokens, features, keys and values, beyond their windows."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import WINDOW, generate_greedy, save_target
from transformers import DynamicCache
from verifier_harness import Harness, Lane

from dflash_wire.sampling import SamplingParams
from verifier.acceptance import chain_parents

pytestmark = pytest.mark.unit

TAPS = [2, 0, 1]
NUM_LAYERS = 4
VOCAB = 64
PROMPT = [7, 3, 60, 21, 21, 0, 44, 13, 9, 30, 2]
NUM_NEW = 30
SLIDING = {"sliding_window": WINDOW, "use_sliding_window": True}
LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3-sliding": ("qwen3", {**SLIDING, "max_window_layers": 2}),
    "llama31": ("llama", {"rope_parameters": LLAMA31}),
    "gemma3": ("gemma3", {"is_tied": True}),
    "gemma3-capped": ("gemma3", {"final_logit_softcapping": 3.0, "num_kv_heads": 1}),
    "qwen3-moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3-moe-mixed": ("qwen3_moe", {"mlp_only_layers": [1], "num_heads": 6}),
    "qwen3-moe-sliding": ("qwen3_moe", SLIDING),
    "gpt-oss": ("gpt_oss", {}),
    "gpt-oss-full": ("gpt_oss", {"layer_types": ["full_attention"]}),
    "gpt-oss-wide": ("gpt_oss", {"num_heads": 8, "num_kv_heads": 1}),
}


@pytest.fixture(scope="module", params=CASES)
def target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    family, values = CASES[request.param]
    path = tmp_path_factory.mktemp("target")
    return path, save_target(path, family, num_layers=NUM_LAYERS, vocab_size=VOCAB, **values)


@torch.inference_mode()
def check_against_reference(harness: Harness, lane: Lane, model: Any) -> None:
    """Features, keys and values of a lane are what one dense pass over its committed inputs gives."""
    cache = DynamicCache()  # without a config it keeps what lies behind a window too
    ids = torch.tensor([lane.token_ids[: lane.num_cached]])
    hidden = model(ids, output_hidden_states=True, cache=cache).hidden_states
    expected = torch.cat([hidden[tap + 1][0] for tap in TAPS], dim=-1)
    torch.testing.assert_close(torch.stack(lane.features), expected, atol=5e-5, rtol=1e-4)
    layers = [torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]
    kv = torch.stack([layer.permute(2, 0, 1, 3) for layer in layers])
    torch.testing.assert_close(harness.pool.data[:, harness.slots(lane)], kv, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("chunk", [1000, 4, 1])
def test_plain_decoding_equals_transformers(target: tuple[Path, Any], chunk: int) -> None:
    path, model = target
    harness = Harness(path, TAPS)
    lane = harness.lane(PROMPT)
    harness.prefill(lane, chunk)
    harness.decode(lane, NUM_NEW - 1)
    expected = generate_greedy(model, PROMPT, NUM_NEW)
    assert len(set(expected)) > 4, "a target that repeats itself would prove little"
    assert lane.token_ids == PROMPT + expected
    check_against_reference(harness, lane, model)
    harness.check_untouched([lane])


def propose(rng: random.Random, truth: list[int], count: int) -> tuple[list[int], list[int]]:
    """A random tree with the truth along some of its path, deeper than a window."""
    parents = [max(0, j - rng.choice([0, 0, 0, 1, 2])) for j in range(count)]
    depths, ids = [0], []
    for parent in parents:
        depths.append(depths[parent] + 1)
        right = truth[depths[-1] - 1] if depths[-1] <= len(truth) else 0
        ids.append(right if rng.random() < 0.9 else rng.randrange(VOCAB))
    return ids, parents


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_wide_steps_equal_plain_decoding(
    target: tuple[Path, Any], shape: str, temperature: float
) -> None:
    path, model = target
    sampling = SamplingParams(temperature, seed=5)
    plain = Harness(path, TAPS)
    lane = plain.lane(PROMPT, sampling=sampling)
    plain.prefill(lane)
    plain.decode(lane, NUM_NEW + 12)
    truth = lane.token_ids
    rng = random.Random(3)
    wide = Harness(path, TAPS, seed=4)
    other = wide.lane(PROMPT, sampling=sampling)
    wide.prefill(other, 5)
    steps = 0
    while len(other.token_ids) < len(PROMPT) + NUM_NEW:
        left = truth[len(other.token_ids) :]
        ids, parents = propose(rng, left, 9)
        if shape == "chain":
            ids, parents = left[:9], chain_parents(9)
            ids[rng.randrange(4, 9)] ^= 1
        wide.step([(other, other.verify_row(len(ids) + 1))], [ids], [parents])
        steps += 1
    assert other.token_ids == truth[: len(other.token_ids)]
    assert steps < NUM_NEW / 2, "drafts were hardly ever accepted"
    check_against_reference(wide, other, model)
    wide.check_untouched([other])


@torch.inference_mode()
def test_logits(target: tuple[Path, Any]) -> None:
    """Scales and caps do not change a greedy choice, so it cannot show them."""
    path, model = target
    output = model(torch.tensor([PROMPT]), output_hidden_states=True)
    ours = Harness(path, TAPS).engine.target.logits(output.hidden_states[-1][0])
    torch.testing.assert_close(ours, output.logits[0], atol=1e-5, rtol=1e-5)
