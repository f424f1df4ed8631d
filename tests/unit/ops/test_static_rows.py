"""Static rows: which bucket a step gets, what is written for its rows and for what fills them up."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflash_ops.graphs import StaticPasses
from dflash_ops.rotary import RotaryTables
from dflash_ops.sampling import SamplingRun, choose_plainly, choose_tokens
from dflash_ops.static_rows import (
    Bucket,
    BucketSizes,
    StaticRow,
    StaticRows,
    bucket_sizes,
    has_plain_sampling,
    seen_by_tree,
)
from dflash_wire.sampling import SamplingParams

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
SIZES = BucketSizes((1, 2, 4), (1, 8, 64), (3, 9), 256)


@pytest.mark.parametrize(
    ("widths", "pages", "expected"),
    [
        ([1], 0, (1, 1, 3)),
        ([2, 1], 3, (2, 8, 3)),
        ([8, 8, 1], 4, (4, 8, 9)),
        ([64] * 4, 9, (4, 64, 9)),
        ([64, 64, 1, 1], 9, (4, 64, 9)),
        ([64, 40, 1, 1], 9, None),  # more than half would be filling
        ([1] * 5, 1, None),
        ([65], 1, None),
        ([1], 10, None),
    ],
)
def test_the_smallest_bucket_that_holds_a_step(
    widths: list[int], pages: int, expected: tuple[int, int, int] | None
) -> None:
    found = SIZES.smallest(widths, pages, True)
    assert found == (None if expected is None else Bucket(*expected, True))


def test_no_bucket_is_larger_than_a_step_may_be() -> None:
    sizes = BucketSizes((1, 2, 4), (1, 8, 64), (3, 9), 128)
    assert sizes.smallest([64, 64], 1) == Bucket(2, 64, 3)
    assert sizes.smallest([64, 64, 64], 1) is None
    assert sizes.num_buckets == 2 * 2 * 8  # of nine, all but (4, 64)


def test_sizes_grow_by_half_at_most_up_to_the_limits() -> None:
    sizes = bucket_sizes(40, 16, 2048, 512, pages_matter=True)
    assert sizes.rows == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40)
    assert sizes.widths == (1, 2, 3, 4, 6, 8, 12, 16)
    assert sizes.pages == (16, 64, 256, 1024, 2048)
    assert bucket_sizes(1, 1, 5, 8, pages_matter=True) == BucketSizes((1,), (1,), (5,), 8)
    assert bucket_sizes(2, 3, 2048, 8, pages_matter=False).pages == (2048,)


def test_rows_of_one_width_always_have_a_bucket() -> None:
    """As the sizes grow slowly enough that nothing is mostly filling."""
    sizes = bucket_sizes(64, 64, 1, 64 * 64, pages_matter=False)
    for rows in range(1, 65):
        for width in range(1, 65):
            assert sizes.smallest([width] * rows, 1) is not None, (rows, width)


def bits(rows: StaticRows) -> list[list[list[int]]]:
    return rows.visible.int().tolist()


def test_rows_and_what_fills_them_up() -> None:
    rows = StaticRows(Bucket(3, 3, 2), CPU)
    sampled = SamplingParams(temperature=0.7, seed=2**63 - 1)
    rows.fill(
        [
            StaticRow([7, 8], 5, [4, 1], 2, feature_offset=9, sampling=sampled),
            StaticRow([6, 5, 4], 1, [3], 3, seen_by_tree([0, 0]), [0, 0], [0, 1, 1]),
        ]
    )
    assert rows["token_ids"].tolist() == [[7, 8, 0], [6, 5, 4], [0, 0, 0]]
    assert rows["num_tokens"].tolist() == [2, 3, 0]
    assert rows["start"].tolist() == [5, 1, 0]
    assert rows.positions.tolist() == [[5, 6, 7], [1, 2, 2], [0, 1, 2]]
    assert rows["parents"].tolist() == [[0, 0, 1], [0, 0, 0], [0, 0, 1]]
    assert bits(rows) == [
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]],
        [[1, 0, 0], [1, 1, 0], [1, 0, 1]],
        [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    ]
    assert rows.slots(4)[0].tolist() == [5, 6, 7]
    assert rows.slots(4)[1].tolist() == [13, 14, 14]
    assert rows["feature_offset"].tolist() == [9, 0, 0]
    assert rows["seed"].tolist() == [2**63 - 1, 0, 0]
    assert torch.equal(rows.temperatures(2), torch.tensor([0.7, 0.7, 0.0, 0.0, 0.0, 0.0]))
    assert rows.seeds(1).tolist() == [2**63 - 1, 0, 0]
    rows.fill([StaticRow([1], 0, [0], 1)])
    assert rows["token_ids"].tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert rows["seed"].tolist() == [0, 0, 0]


def test_the_widest_row_uses_all_bits() -> None:
    rows = StaticRows(Bucket(1, 64, 1), CPU)
    rows.fill([StaticRow(range(64), 0, [0], 64)])
    assert torch.equal(rows.visible[0], torch.ones(64, 64, dtype=torch.bool).tril())
    rows.fill([StaticRow(range(64), 0, [0], 64, [(1 << 64) - 1] * 64)])
    assert bool(rows.visible.all())


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), True),
        (SamplingParams(top_k=5), True),
        (SamplingParams(temperature=1.0), True),
        (SamplingParams(temperature=1.0, top_k=5), False),
        (SamplingParams(temperature=1.0, top_p=0.9), False),
        (SamplingParams(temperature=1.0, min_p=0.1), False),
        (SamplingParams(temperature=1.0, rejects=True), False),
    ],
)
def test_plain_sampling_leaves_no_token_out(params: SamplingParams, expected: bool) -> None:
    assert has_plain_sampling(params) is expected


def test_plain_choice_equals_the_general_one() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.8, seed=3),
        SamplingParams(temperature=1e-9, seed=4),
    ]
    runs = [SamplingRun(2 * i, 2 * i + 2, 10 * i, p) for i, p in enumerate(params)]
    temperatures, seeds = (
        torch.tensor([getattr(p, name) for p in params]).repeat_interleave(2)
        for name in ("temperature", "seed")
    )
    positions = torch.tensor([0, 1, 10, 11, 20, 21])
    chosen = choose_plainly(logits, temperatures, seeds, positions, samples=True)
    assert torch.equal(chosen, choose_tokens(logits, runs))
    greedy = choose_plainly(logits, temperatures, seeds, positions, samples=False)
    assert torch.equal(greedy, logits.argmax(dim=-1))


def test_on_a_cpu_passes_run_as_they_are() -> None:
    calls: list[str] = []

    def make() -> object:
        calls.append("made")
        return lambda: (calls.append("run"), torch.ones(1))[1]

    passes = StaticPasses("test", CPU, 10**9)
    for _ in range(2):
        assert passes.run("key", make).tolist() == [1.0]  # type: ignore[arg-type]
    assert calls == ["made", "run", "run"] and passes.keys == ["key"]
    assert str(passes.memory) == "0 graphs in 0 MiB"


def test_reserved_rotations_stay_where_they_are() -> None:
    """A captured pass reads the tables that there were, also when larger ones have taken their place."""
    config = Qwen3Config(head_dim=8, hidden_size=16, num_attention_heads=2)
    tables = RotaryTables(Qwen3RotaryEmbedding(config), torch.zeros(1))
    tables.reserve(2000)
    reserved = tables._cos
    tables.at([5000])
    assert tables._cos is not reserved
    assert any(cos is reserved for cos, _ in tables._kept)
    positions = [0, 1999, 7]
    on_device = tables.at(torch.tensor(positions)).pair
    for mine, right in zip(on_device, tables.at(positions).pair, strict=True):
        assert torch.equal(mine, right)


def test_a_pass_that_cannot_be_captured_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a card, where an operation of a library may refuse it."""
    tried: list[object] = []

    def refuses(self: StaticPasses, key: object, known: object) -> None:
        tried.append(key)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(StaticPasses, "_capture", refuses)
    monkeypatch.setattr(StaticPasses, "_may_capture", lambda self: self._limit_bytes > 0)
    passes = StaticPasses("test", CPU, 10**9)
    for key in ("a", "b", "a"):
        assert passes.run(key, lambda: lambda: torch.ones(1)).tolist() == [1.0]
    assert tried == ["a"]
    assert "test pass a cannot be captured; no more are" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_passes_are_replayed_within_the_bound() -> None:
    device = torch.device("cuda")
    value = torch.zeros(4, device=device)
    passes = StaticPasses("test", device, 1)
    for key, is_captured in (("first", True), ("second", False)):
        for expected in (2.0, 3.0):
            value.fill_(expected)
            assert passes.run(key, lambda: lambda: value * 2).tolist() == [2 * expected] * 4
        assert passes.memory.num_captured == 1
        assert (passes.memory.num_plain == 0) is is_captured
