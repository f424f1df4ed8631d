"""The verifier engine against transformers, and against itself at width 1."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import generate_greedy, reference_pass, save_target
from verifier_harness import Harness, Lane

from dflash_ops.context_attention import ContextAttention, PlainContext
from dflash_wire.errors import FatalError
from dflash_wire.records import DraftResult, StepPlan
from dflash_wire.sampling import SamplingParams
from verifier.acceptance import chain_parents

pytestmark = pytest.mark.unit

TAPS = [1, 0]  # order matters: features are concatenated as listed
VOCAB = 64
SHAPES = [("qwen3", 4, 2), ("qwen3", 4, 4), ("qwen3", 6, 2), ("llama", 4, 1), ("llama", 4, 2)]
CHUNKS = [1000, 4, 1]
PROMPT = [7, 3, 60, 21, 21, 0, 44, 13, 9, 30, 2]
NUM_NEW = 24

Proposal = tuple[list[int], list[int]]
Proposer = Callable[[random.Random, list[int], int], Proposal]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    saved: dict[str, tuple[Path, Any]] = {}
    for family, heads, kv_heads in SHAPES:
        path = tmp_path_factory.mktemp("target")
        model = save_target(path, family, num_heads=heads, num_kv_heads=kv_heads, vocab_size=VOCAB)
        saved[f"{family}-{heads}-{kv_heads}"] = path, model
    return saved


@pytest.fixture(scope="module")
def target(targets: dict[str, tuple[Path, Any]]) -> tuple[Path, Any]:
    return targets["qwen3-4-2"]


def check_against_reference(harness: Harness, lane: Lane, model: Any) -> None:
    """Pool and features of a lane are what one dense pass over its committed inputs gives."""
    hidden, kv = reference_pass(model, lane.token_ids[: lane.num_cached])
    torch.testing.assert_close(harness.pool.data[:, harness.slots(lane)], kv, atol=2e-5, rtol=1e-4)
    expected = torch.cat([hidden[tap + 1] for tap in TAPS], dim=-1)
    torch.testing.assert_close(torch.stack(lane.features), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("shape", [f"{f}-{h}-{g}" for f, h, g in SHAPES])
def test_plain_decoding_equals_transformers(
    targets: dict[str, tuple[Path, Any]], shape: str, chunk: int
) -> None:
    path, model = targets[shape]
    harness = Harness(path, TAPS)
    lane = harness.lane(PROMPT)
    harness.prefill(lane, chunk)
    harness.decode(lane, NUM_NEW - 1)
    expected = generate_greedy(model, PROMPT, NUM_NEW)
    assert len(set(expected)) > 4, "a target that repeats itself would prove little"
    assert lane.token_ids == PROMPT + expected
    assert lane.num_cached == len(lane.token_ids) - 1
    check_against_reference(harness, lane, model)
    harness.check_untouched([lane])


def test_tied_embeddings(tmp_path: Path) -> None:
    model = save_target(tmp_path, is_tied=True)
    harness = Harness(tmp_path, TAPS)
    lane = harness.lane(PROMPT)
    harness.prefill(lane)
    harness.decode(lane, NUM_NEW - 1)
    assert lane.token_ids == PROMPT + generate_greedy(model, PROMPT, NUM_NEW)


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("qwen3", {"attention_bias": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"hidden_act": "gelu"}),
        ("llama", {"rms_norm_eps": 0.1}),
    ],
    ids=str,
)
def test_variants_of_a_layer(tmp_path: Path, family: str, values: dict[str, Any]) -> None:
    model = save_target(tmp_path, family, **values)
    harness = Harness(tmp_path, TAPS)
    lane = harness.lane(PROMPT)
    harness.prefill(lane)
    harness.decode(lane, NUM_NEW - 1)
    assert lane.token_ids == PROMPT + generate_greedy(model, PROMPT, NUM_NEW)
    check_against_reference(harness, lane, model)


def propose_right(rng: random.Random, truth: list[int], count: int) -> Proposal:
    return truth[:count], chain_parents(count)


def propose_wrong(rng: random.Random, truth: list[int], count: int) -> Proposal:
    return [(t + 1) % VOCAB for t in truth[:count]], chain_parents(count)


def propose_partly(rng: random.Random, truth: list[int], count: int) -> Proposal:
    good = rng.randint(0, count)
    return truth[:good] + [(t + 1) % VOCAB for t in truth[good:count]], chain_parents(count)


def propose_tree(rng: random.Random, truth: list[int], count: int) -> Proposal:
    """A random tree in which about half of the nodes carry the truth of their depth."""
    parents: list[int] = []
    levels = [0]
    drafts = []
    for j in range(count):
        parents.append(rng.choice([j, rng.randint(0, j)]))
        levels.append(levels[parents[j]] + 1)
        right = truth[levels[j + 1] - 1]
        drafts.append(right if rng.random() < 0.6 else rng.randrange(VOCAB))
    return drafts, parents


PROPOSERS = [propose_right, propose_wrong, propose_partly, propose_tree]


def decode_wide(
    harness: Harness, lane: Lane, truth: list[int], width: int, proposer: Proposer
) -> list[int]:
    """Decode until ``truth`` (prompt included) is covered; return tokens committed per cycle."""
    rng = random.Random(width)
    num_committed = []
    while len(lane.token_ids) < len(truth) - width:
        drafts, parents = proposer(rng, truth[len(lane.token_ids) :], width - 1)
        result = harness.step([(lane, lane.verify_row(width))], [drafts], [parents])
        num_committed.append(len(result.committed_token_ids[0]))
    return num_committed


@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("width", [2, 5, 8])
def test_drafts_never_change_the_output(
    target: tuple[Path, Any], width: int, proposer: Proposer
) -> None:
    path, model = target
    truth = PROMPT + generate_greedy(model, PROMPT, NUM_NEW + width)
    harness = Harness(path, TAPS)
    lane = harness.lane(PROMPT)
    harness.prefill(lane)
    num_committed = decode_wide(harness, lane, truth, width, proposer)
    assert lane.token_ids == truth[: len(lane.token_ids)]
    check_against_reference(harness, lane, model)
    harness.check_untouched([lane])
    if proposer is propose_right:
        assert set(num_committed) == {width}
    elif proposer is propose_wrong:
        assert set(num_committed) == {1}
    else:
        assert max(num_committed) > 1
        assert min(num_committed) < width


@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("width", [2, 4, 8])
def test_sampled_output_does_not_depend_on_width(
    target: tuple[Path, Any], width: int, proposer: Proposer
) -> None:
    path, model = target
    sampling = SamplingParams(temperature=0.8, top_p=0.9, top_k=12, seed=2**62 + 5)
    plain = Harness(path, TAPS)
    reference = plain.lane(PROMPT, sampling=sampling)
    plain.prefill(reference)
    plain.decode(reference, NUM_NEW + width)
    truth = reference.token_ids
    assert truth[: len(PROMPT) + NUM_NEW] != PROMPT + generate_greedy(model, PROMPT, NUM_NEW)

    harness = Harness(path, TAPS)
    lane = harness.lane(PROMPT, sampling=sampling)
    harness.prefill(lane, 3)
    num_committed = decode_wide(harness, lane, truth, width, proposer)
    assert lane.token_ids == truth[: len(lane.token_ids)]
    assert len(lane.token_ids) >= len(PROMPT) + NUM_NEW - width
    assert (max(num_committed) == 1) == (proposer is propose_wrong)
    harness.check_untouched([lane])


def test_prefill_samples_what_decoding_would(target: tuple[Path, Any]) -> None:
    """A replaced executor prefills all committed tokens and goes on exactly where it was."""
    sampling = SamplingParams(temperature=1.0, seed=77)
    harness = Harness(target[0], TAPS)
    lane = harness.lane(PROMPT, sampling=sampling)
    harness.prefill(lane)
    harness.decode(lane, 20)
    for num_known in range(len(PROMPT) + 1, len(lane.token_ids) - 2, 3):
        fresh = Harness(target[0], TAPS)
        again = fresh.lane(lane.token_ids[:num_known], sampling=sampling)
        fresh.prefill(again, 8)
        fresh.decode(again, 2)
        assert again.token_ids == lane.token_ids[: num_known + 3]


@pytest.mark.parametrize("form", [None, PlainContext()])
def test_sequences_in_one_step_equal_each_alone(
    target: tuple[Path, Any], form: ContextAttention | None
) -> None:
    """Prefill chunks, plain rows and wide rows of several sequences share every step; row by row, and with
    the context of all rows apart, as on a GPU."""
    path, model = target
    rng = random.Random(4)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (1, 5, 17, 9)]
    samplings = [
        SamplingParams(),
        SamplingParams(0.7, 0.9, 0, 3),
        SamplingParams(),
        SamplingParams(1.0, 1.0, 5, 4),
    ]
    truths, alone = [], Harness(path, TAPS, num_pages=80)
    lanes = []
    for prompt, sampling in zip(prompts, samplings, strict=True):
        lane = alone.lane(prompt, 48, sampling)
        alone.prefill(lane)
        alone.decode(lane, 28)
        truths.append(lane.token_ids)
        lanes.append(lane)
    assert truths[2] == prompts[2] + generate_greedy(model, prompts[2], 29)

    together = Harness(path, TAPS, num_pages=80, seed=9, form=form)
    mixed = [together.lane(p, 48, s) for p, s in zip(prompts, samplings, strict=True)]
    widths = [4, 1, 6, 3]
    for step in range(12):
        entries, drafts, parents = [], [], []
        for i in rng.sample(range(4), 4):
            lane = mixed[i]
            if step < i or len(lane.token_ids) > len(truths[i]) - 7:
                continue  # joins later, or is done
            if lane.num_cached < len(lane.token_ids) - 1 or lane.num_cached == 0:
                entries.append((lane, lane.prefill_row(7)))
                proposal: Proposal = ([], [])
            else:
                entries.append((lane, lane.verify_row(widths[i])))
                proposal = propose_tree(rng, truths[i][len(lane.token_ids) :], widths[i] - 1)
            drafts.append(proposal[0])
            parents.append(proposal[1])
        if entries:
            together.step(entries, drafts, parents)
    for lane, truth in zip(mixed, truths, strict=True):
        assert len(lane.token_ids) > 10
        assert lane.token_ids == truth[: len(lane.token_ids)]
        check_against_reference(together, lane, model)
    together.check_untouched(mixed)


def test_chunks_without_samples_commit_nothing(target: tuple[Path, Any]) -> None:
    harness = Harness(target[0], TAPS)
    lane = harness.lane(PROMPT)
    first = harness.step([(lane, lane.prefill_row(4))])
    assert first.committed_token_ids == [[]]
    assert (lane.num_cached, lane.token_ids) == (4, PROMPT)
    assert first.verify_ms > 0


def test_drafts_of_another_plan_are_refused(target: tuple[Path, Any]) -> None:
    harness = Harness(target[0], TAPS)
    lane = harness.lane(PROMPT)
    harness.prefill(lane)
    plan = StepPlan(9, [lane.verify_row(3)])
    before = harness.pool.data.clone()
    for drafts in (DraftResult(8, [[1, 2]]), DraftResult(9, []), DraftResult(9, [[1, 2, 3]])):
        with pytest.raises(FatalError, match="step 9"):
            harness.engine.run(plan, drafts)
    assert torch.equal(harness.pool.data, before)
