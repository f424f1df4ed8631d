"""Passes over static memory, with padding, commit what packed passes do: tokens, K/V and features."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from device_waits import no_waiting
from random_trees import random_tree
from tiny_models import save_target
from verifier_harness import Harness, Lane

from dflash_ops.context_attention import PlainContext
from dflash_ops.static_rows import BucketSizes, seen_by_tree
from dflash_wire.records import DraftResult, Row, RowExtras, StepPlan
from dflash_wire.sampling import SamplingParams
from verifier.acceptance import accept, ancestor_mask, depths
from verifier.device_acceptance import accept_on_device
from verifier.packing import pack_rows
from verifier.static_verify import acceptance_of, static_row, why_not_static
from verifier.target import TargetModel

pytestmark = pytest.mark.unit

TAPS = [0, 2]
NUM_PAGES = 60
SIZES = BucketSizes((1, 2, 4), (1, 3, 8), (2, 16), 64)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    save_target(path)
    return path


@pytest.mark.parametrize("seed", range(40))
def test_acceptance_equals_the_hosts(seed: int) -> None:
    """Random trees over three tokens, so that paths are long and siblings often equal."""
    rng = random.Random(seed)
    width, rows = 7, 5
    shape = (rows, width)
    token_ids, chosen = torch.zeros(2, *shape, dtype=torch.int64)
    parents, all_depths = torch.zeros(2, *shape, dtype=torch.int64)
    visible = torch.eye(width, dtype=torch.bool).repeat(rows, 1, 1)
    num_tokens = torch.tensor([0] + [rng.randint(1, width) for _ in range(rows - 1)])
    expected = []
    for row, count in enumerate(num_tokens.tolist()):
        tree = random_tree(rng, max(count - 1, 0))
        drafts = [rng.randrange(3) for _ in tree]
        picks = [rng.randrange(3) for _ in range(width)]
        # Behind a row's own tokens lies whatever was there: it must not matter.
        token_ids[row] = torch.tensor(
            [9, *drafts, *(rng.randrange(3) for _ in range(width))][:width]
        )
        chosen[row] = torch.tensor(picks)
        parents[row, 1:count] = torch.tensor(tree)
        all_depths[row] = torch.tensor(
            [*depths(tree), *(rng.randrange(width) for _ in range(width))][:width]
        )
        visible[row, :count, :count] = ancestor_mask(tree)[:count, :count]
        expected.append(accept(drafts, picks[:count], tree) if count else None)
    path = accept_on_device(token_ids, chosen, parents, all_depths, visible, num_tokens)
    for row, host in enumerate(expected):
        count = int(path.counts[row])
        if host is None:
            assert count == 0 and not bool(path.is_kept[row].any())
            continue
        assert path.nodes[row, :count].tolist() == host.nodes
        assert path.token_ids[row, :count].tolist() == host.token_ids
        assert path.is_kept[row].nonzero()[:, 0].tolist() == host.nodes


def test_what_a_tree_shows_is_its_ancestors() -> None:
    parents = random_tree(random.Random(3), 20)
    mask = ancestor_mask(parents)
    for seen, row in zip(seen_by_tree(parents), mask, strict=True):
        assert [seen >> k & 1 for k in range(21)] == row.int().tolist()


def draft_for(lane: Lane, plain: list[int], count: int, rng: random.Random) -> list[int]:
    """The tokens that plain decoding yields next, now and then a wrong one."""
    start = len(lane.token_ids)
    right = plain[start : start + count]
    return [t if rng.random() < 0.75 else (t + 1) % 64 for t in right]


def run_steps(
    harness: Harness, plain: list[list[int]], sampling: list[SamplingParams], seed: int
) -> list[Lane]:
    """Several steps over all lanes with chains and trees of random widths."""
    rng = random.Random(seed)
    lanes = [
        harness.lane(tokens[:5], sampling=s) for tokens, s in zip(plain, sampling, strict=True)
    ]
    for lane in lanes:
        harness.prefill(lane, 3)
    for _ in range(6):
        mine = rng.sample(range(len(lanes)), rng.randint(1, len(lanes)))
        rows: list[tuple[Lane, Row]] = []
        drafts: list[list[int]] = []
        parents: list[list[int]] = []
        for i in mine:
            width = rng.randint(1, 6)
            chain = draft_for(lanes[i], plain[i], width - 1, rng)
            is_tree = len(chain) == width - 1 and rng.random() < 0.5
            tree = random_tree(rng, width - 1) if is_tree else []
            row = lanes[i].tree_row(width, 6) if is_tree else lanes[i].verify_row(width)
            if is_tree:
                levels = depths(tree)[1:]
                chain = [chain[level - 1] if rng.random() < 0.8 else 1 for level in levels]
            rows.append((lanes[i], row))
            drafts.append(chain)
            parents.append(tree)
        harness.step(rows, drafts, parents)
    return lanes


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "sizes",
    [None, SIZES, BucketSizes((4,), (8,), (16,), 64), BucketSizes((3,), (6,), (15,), 18)],
)
def test_steps_equal_those_of_the_row_by_row_form(
    target: Path, sizes: BucketSizes | None, temperature: float, seed: int
) -> None:
    sampling = [SamplingParams(temperature=temperature * (i != 1), seed=i) for i in range(3)]
    torch.manual_seed(seed)
    prompts = torch.randint(0, 64, (3, 5)).tolist()
    plain = Harness(target, TAPS, NUM_PAGES, seed)
    texts = []
    for prompt, params in zip(prompts, sampling, strict=True):
        lane = plain.lane(prompt, sampling=params)
        plain.prefill(lane)
        plain.decode(lane, 40)
        texts.append(lane.token_ids)
    expected = run_steps(Harness(target, TAPS, NUM_PAGES, seed), texts, sampling, seed)
    harness = Harness(target, TAPS, NUM_PAGES, seed, form=PlainContext(), sizes=sizes)
    lanes = run_steps(harness, texts, sampling, seed)
    for mine, other, text in zip(lanes, expected, texts, strict=True):
        assert mine.token_ids == other.token_ids == text[: len(mine.token_ids)]
        torch.testing.assert_close(
            torch.stack(mine.features), torch.stack(other.features), atol=1e-4, rtol=1e-4
        )
    harness.check_untouched(lanes)
    if sizes is not None:
        assert harness.engine.static is not None
        assert harness.engine.static.passes.keys  # some steps took this way


def test_steps_that_need_more_are_packed_as_they_are(target: Path) -> None:
    harness = Harness(target, TAPS, form=PlainContext(), sizes=SIZES)
    static = harness.engine.static
    assert static is not None
    lane = harness.lane([1, 2, 3])
    harness.prefill(lane)
    assert not static.passes.keys
    asking = lane.verify_row(1)
    asking.extras = RowExtras(num_logprobs=0)
    harness.step([(lane, asking)])
    harness.step([(lane, lane.verify_row(20))], [[1] * 19])
    lane.sampling = SamplingParams(temperature=1.0, top_k=3)
    harness.step([(lane, lane.verify_row(2))], [[1]])
    assert not static.passes.keys
    lane.sampling = SamplingParams()
    harness.step([(lane, lane.verify_row(2))], [[1]])
    assert static.passes.keys == [(1, 3, 2, False)]


def test_a_pass_never_waits_for_the_device(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What asks a tensor for numbers on the host fails here, as it would in a capture."""
    harness = Harness(target, TAPS, form=PlainContext(), sizes=SIZES)
    static = harness.engine.static
    assert static is not None
    lane = harness.lane([1, 2, 3], sampling=SamplingParams(temperature=1.0))
    harness.prefill(lane)
    plan = StepPlan(1, [lane.verify_row(3), lane.verify_row(2)])
    packed = pack_rows(plan, DraftResult(1, [[4, 5], [6]]))
    bucket = static.bucket_of(packed)
    assert bucket is not None
    rows = [static_row(p, 3 * i, bucket.pages) for i, p in enumerate(packed)]
    drafts = torch.tensor([[7, 8]])
    with torch.inference_mode():
        static.launch(rows, bucket)  # whatever is made once
        with no_waiting(monkeypatch):
            found = static.launch(rows, bucket, drafts)
        first = acceptance_of(found[0].tolist())
    assert len(first.token_ids) == len(first.nodes) >= 1
    inputs = static._inputs(bucket)
    assert inputs["token_ids"][:2].tolist() == [
        [lane.token_ids[-1], 7, 8],
        [lane.token_ids[-1], 6, 0],
    ]


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3", None),
        ("llama", None),
        ("gemma3", "it has layers with a sliding window"),
        ("qwen3_moe", "its layers choose experts, or are not ours"),
    ],
)
def test_which_targets_have_static_passes(family: str, reason: str | None, tmp_path: Path) -> None:
    save_target(tmp_path, family)
    model = TargetModel(str(tmp_path), torch.float32, torch.device("cpu"))
    assert why_not_static(model) == reason
