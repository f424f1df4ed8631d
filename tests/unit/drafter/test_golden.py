"""Our drafter against the public ``dflash`` package: logits, then whole generations."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import dflash.model
import pytest
import torch
from drafter_helpers import (
    HIDDEN,
    draft_config,
    make_engine,
    page_tables,
    random_weights,
    run_with_logits,
    save_random_draft,
    verify_row,
)
from tiny_models import generate_greedy, save_target
from torch.nn.functional import embedding, linear
from transformers import DynamicCache

from dflash_ops.paging import PagedPool
from dflash_wire.ports import EngineLimits
from dflash_wire.records import GenerationRequest, Ingest, StepPlan, TokenChunk
from drafter.borrowed import load_borrowed_weights
from gateway.coordinator.coordinator import Coordinator
from services.local import LocalRing
from verifier.engine import VerifierEngine
from verifier.target import TargetModel

pytestmark = [
    pytest.mark.unit,
    # The reference package calls transformers by an older name.
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),
]

CYCLES = [(9, 6), (1, 6), (4, 3), (6, 6), (2, 2)]
"""Newly committed tokens and draft width of every cycle; the first is the prompt."""


SLIDING = {"sliding_window": 5, "use_sliding_window": True}
MIXED = ["full_attention", "sliding_attention"]
ROPE = {"rope_type": "default", "rope_theta": 90.0}
SECOND = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}


def load_reference(path: Path) -> Any:
    kind = json.loads((path / "config.json").read_text())["architectures"][0]
    model = getattr(dflash.model, kind).from_pretrained(path, dtype=torch.float32)
    return model.eval()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_layers", "num_heads", "num_kv_heads", "nested", "top"),
    [
        (1, 4, 2, {}, {}),
        (2, 4, 4, {"target_layer_ids": [1, 5, 9]}, {}),
        (2, 6, 2, {"target_layer_ids": [8, 0, 4, 3, 1]}, {}),
        (3, 4, 1, {}, {}),
        (5, 4, 2, {}, {}),
        (5, 4, 2, {"target_layer_ids": [2, 4, 6]}, {}),
        (2, 4, 2, {"input_embedding_scale": 5.5, "block_size": 8}, {}),
        (2, 4, 2, {}, {"attention_bias": True, "hidden_act": "gelu"}),
        (8, 8, 1, {"target_layer_ids": [1, 3, 5, 7, 9]}, {}),
        (8, 4, 4, {"target_layer_ids": [2, 6, 9]}, {}),
        (2, 4, 2, {}, {**SLIDING, "layer_types": MIXED}),
        (3, 8, 2, {"target_layer_ids": [1, 4, 9]}, {**SLIDING, "layer_types": [*MIXED, MIXED[1]]}),
        (5, 4, 2, {"causal": None}, {**SLIDING, "layer_types": MIXED[1:] * 5}),
        (2, 4, 1, {}, {**SLIDING, "layer_types": MIXED, "is_causal": False}),
        (2, 4, 2, {}, {**SLIDING, "layer_types": MIXED, "is_causal": True}),
        (2, 4, 2, {}, {"rope_parameters": {**ROPE, "rope_type": "yarn", "factor": 4.0}}),
        (1, 4, 2, {}, {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 2.0}}),
        (
            1,
            4,
            2,
            {},
            {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}},
        ),
        (1, 6, 3, {"output_multiplier": 0.4, "final_logit_softcapping": 1.5}, {}),
    ],
)
@torch.inference_mode()
def test_logits_over_cycles(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    nested: dict[str, Any],
    top: dict[str, Any],
    stored: torch.dtype,
) -> None:
    """Weights that only float32 holds take dense products, weights of 16 bits packed ones."""
    config = draft_config(num_layers, num_heads, num_kv_heads, dflash_config=nested, **top)
    save_random_draft(tmp_path, config, dtype=stored)
    theirs, ours = load_reference(tmp_path), make_engine(tmp_path)
    assert list(theirs.target_layer_ids) == ours.model.target_layer_ids
    assert theirs.block_size == ours.model.draft_block_size
    assert theirs.mask_token_id == ours.model.mask_token_id
    weights = random_weights()
    scale = float(nested.get("input_embedding_scale", 1.0))
    cache = DynamicCache(config=theirs.config)
    cache.activate_past_recording()
    (pages,) = page_tables(1)
    features = torch.randn(sum(n for n, _ in CYCLES), theirs.fc.in_features)
    start = 0
    for cycle, (count, width) in enumerate(CYCLES):
        anchor = 7 * cycle + 1
        chunk = features[start : start + count]
        ids = torch.tensor([anchor] + [theirs.mask_token_id] * (width - 1))
        hidden = theirs(
            target_hidden=chunk[None],
            noise_embedding=(embedding(ids, weights.embedding) * scale)[None],
            position_ids=torch.arange(start, start + count + width)[None],
            past_key_values=cache,
            use_cache=True,
        )[0]
        start += count
        cache.crop(start - cache.get_seq_length())
        expected = theirs.compute_logits(hidden[1:], lambda x: linear(x, weights.head))

        ours.feature_pools[0][5 : 5 + count] = chunk
        plan = StepPlan(
            cycle,
            [verify_row(anchor, start, pages, width)],
            [Ingest(5, count, start - count, pages)],
        )
        drafts, logits = run_with_logits(ours, plan, monkeypatch)
        kept = [i for i in range(logits.shape[1]) if i != theirs.mask_token_id]
        torch.testing.assert_close(logits[:, kept], expected[:, kept], atol=3e-5, rtol=1e-5)
        assert expected.std() > 0.3, "flat logits would prove little"
        assert drafts == [expected[:, kept].argmax(dim=-1).tolist()]


class ListSink:
    """Keeps every chunk."""

    def __init__(self) -> None:
        self.chunks: list[TokenChunk] = []

    def publish(self, chunks: dict[str, list[TokenChunk]]) -> None:
        for mine in chunks.values():
            self.chunks += mine


class Pair:
    """One target with one drafter, as the reference package and as our engines have them."""

    VOCAB = 10
    NUM_LAYERS = 8

    def __init__(
        self, path: Path, family: str, seed: int, num_draft_layers: int, **draft_values: Any
    ) -> None:
        self.target_path, self.draft_path = path / "target", path / "drafter"
        self.target = save_target(
            self.target_path,
            family,
            num_layers=self.NUM_LAYERS,
            vocab_size=self.VOCAB,
            silent_token_id=self.VOCAB - 1,
            seed=seed,
        )
        config = draft_config(
            num_draft_layers,
            vocab_size=self.VOCAB,
            num_target_layers=self.NUM_LAYERS,
            **draft_values,
        )
        save_random_draft(self.draft_path, config, seed)
        self.draft = load_reference(self.draft_path)

    def reference(
        self, prompt: list[int], count: int, stops: list[int], draft_block_size: int
    ) -> tuple[list[int], list[int]]:
        """New tokens and committed tokens per cycle of ``dflash_generate``."""
        output = dflash.model.dflash_generate(
            self.draft,
            self.target,
            torch.tensor([prompt]),
            max_new_tokens=count,
            stop_token_ids=stops,
            block_size=draft_block_size,
            return_stats=True,
        )
        return output.output_ids[0, len(prompt) :].tolist(), output.acceptance_lengths

    def coordinator(self, policy: str, max_step_positions: int) -> tuple[Coordinator, ListSink]:
        cpu = torch.device("cpu")
        limits = EngineLimits(
            num_pages=96,
            page_size=4,
            max_step_positions=max_step_positions,
            max_rows=4,
            max_context=128,
            max_draft_block_size=16,
        )
        target = TargetModel(str(self.target_path), torch.float32, cpu)
        taps = list(self.draft.target_layer_ids)
        features = torch.full((2 * max_step_positions, len(taps) * HIDDEN), torch.nan)
        pool = PagedPool(
            target.num_layers, 96, 4, target.num_kv_heads, target.head_dim, torch.float32, cpu
        )
        borrowed = load_borrowed_weights(self.target_path, torch.float32, cpu)
        drafter = make_engine(self.draft_path, borrowed, num_pages=96)
        drafter.feature_pools[0] = features
        verifier = VerifierEngine(target, pool, features, taps)
        sink = ListSink()
        return Coordinator(LocalRing([drafter], verifier), sink, limits, policy, cohorts=(1,)), sink


PAIRS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "qwen3": ("qwen3", 1, 3, {}),
    "llama": ("llama", 7, 1, {}),
    "sliding": ("qwen3", 1, 2, {**SLIDING, "layer_types": MIXED}),
    "gemma3": ("gemma3", 3, 2, {"input_embedding_scale": HIDDEN**0.5}),
    "gpt_oss": ("gpt_oss", 3, 1, {}),
    "second": ("qwen3", 1, 2, {**SLIDING, "layer_types": MIXED, "is_causal": False, **SECOND}),
}


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    family, seed, num_draft_layers, values = PAIRS[request.param]
    return Pair(tmp_path_factory.mktemp("pair"), family, seed, num_draft_layers, **values)


@pytest.fixture(autouse=True)
def reference_never_drafts_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask token may be among the reference's candidates; with us it never is."""
    plain = dflash.model.DFlashDraftModel.compute_logits

    def without_mask(self: Any, hidden: torch.Tensor, head: Any) -> torch.Tensor:
        logits = plain(self, hidden, head)
        if isinstance(self, dflash.model.DFlash2DraftModel):
            logits[..., self.mask_token_id] = -torch.inf
        return logits

    monkeypatch.setattr(dflash.model.DFlashDraftModel, "compute_logits", without_mask)


@pytest.fixture(autouse=True)
def reference_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference package synchronises a GPU to read its clock."""
    monkeypatch.setattr(dflash.model, "_cuda_time", time.perf_counter)


def make_prompts() -> list[list[int]]:
    rng = random.Random(6)
    return [[rng.randrange(Pair.VOCAB - 1) for _ in range(n)] for n in (1, 6, 13, 22)]


def generate(
    pair: Pair, requests: list[GenerationRequest], policy: str, max_step_positions: int = 96
) -> dict[str, tuple[list[int], list[int], str | None]]:
    """Tokens, committed tokens per cycle and finish reason by request id."""
    coordinator, sink = pair.coordinator(policy, max_step_positions)
    for request in requests:
        coordinator.submit(request)
    while coordinator.step():
        coordinator.check_integrity()
    found = {}
    for request in requests:
        chunks = [c for c in sink.chunks if c.request_id == request.request_id]
        last = chunks[-1]
        assert last.error is None
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        committed_per_cycle = [c.cycle.num_committed for c in chunks if c.cycle is not None]
        found[request.request_id] = tokens, committed_per_cycle, last.finish_reason
    assert coordinator.snapshot().num_free_pages == 96
    return found


@pytest.mark.parametrize("draft_block_size", [2, 4, 8, 16])
def test_generations_equal_the_reference_loop(pair: Pair, draft_block_size: int) -> None:
    """Four sequences in one batch; each equals the reference loop alone, cycle by cycle."""
    prompts, counts = make_prompts(), [21, 1, 16, 24]
    requests = [
        GenerationRequest(f"r{i}", prompt, count)
        for i, (prompt, count) in enumerate(zip(prompts, counts, strict=True))
    ]
    found = generate(pair, requests, f"static:{draft_block_size}")
    longest = 0
    for request in requests:
        tokens, per_cycle, reason = found[request.request_id]
        prompt, count = request.prompt_token_ids, request.max_tokens
        assert (tokens, per_cycle) == pair.reference(prompt, count, [], draft_block_size)
        assert tokens == generate_greedy(pair.target, prompt, count)
        assert (len(tokens), reason) == (count, "length")
        longest = max([longest, *per_cycle])
    assert longest > 1, "no draft was ever accepted"


@pytest.mark.parametrize("pair", ["qwen3", "llama"], indirect=True)
@pytest.mark.parametrize("draft_block_size", [4, 16])
def test_stop_token_inside_a_block(pair: Pair, draft_block_size: int) -> None:
    """Every token that first appears later in the output is tried as the stop token."""
    prompt, count = make_prompts()[2], 24
    full, per_cycle = pair.reference(prompt, count, [], draft_block_size)
    cycle_ends = {1 + sum(per_cycle[: i + 1]) for i in range(len(per_cycle))}
    stops = sorted(set(full))
    requests = [
        GenerationRequest(f"s{stop}", prompt, count, stop_token_ids=[stop]) for stop in stops
    ]
    found = generate(pair, requests, f"static:{draft_block_size}")
    num_inside = 0
    for stop, request in zip(stops, requests, strict=True):
        tokens, committed, reason = found[request.request_id]
        assert (tokens, committed) == pair.reference(prompt, count, [stop], draft_block_size)
        assert tokens == full[: full.index(stop) + 1]
        assert reason == ("stop")
        num_inside += len(tokens) > 1 and len(tokens) not in cycle_ends
    assert num_inside > 0, "no stop token fell inside a block"


def test_chunked_prefill_changes_nothing(pair: Pair) -> None:
    """A prompt longer than a step: features of every chunk reach the drafter."""
    prompt = make_prompts()[3] + make_prompts()[2]
    request = GenerationRequest("long", prompt, 20)
    tokens, per_cycle, _ = generate(pair, [request], "static:8", max_step_positions=16)["long"]
    assert (tokens, per_cycle) == pair.reference(prompt, 20, [], 8)


def test_policy_off_is_plain_decoding(pair: Pair) -> None:
    prompt = make_prompts()[1]
    tokens, per_cycle, _ = generate(pair, [GenerationRequest("plain", prompt, 12)], "off")["plain"]
    assert tokens == generate_greedy(pair.target, prompt, 12)
    assert per_cycle == [1] * 11
