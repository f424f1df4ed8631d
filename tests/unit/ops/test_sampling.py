"""choose_tokens: greedy, the processors against plain Python, and the sampled distribution."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dflash_ops.sampling import SamplingRun, choose_tokens
from dflash_wire.sampling import SamplingParams

pytestmark = pytest.mark.unit

GREEDY = SamplingParams()
VARIANTS = [
    SamplingParams(1.0, 1.0, 0),
    SamplingParams(0.6, 1.0, 0),
    SamplingParams(1.0, 1.0, 3),
    SamplingParams(1.0, 0.7, 0),
    SamplingParams(1.3, 0.8, 5),
    SamplingParams(0.5, 0.95, 1),
    SamplingParams(1.0, 0.0, 0),
    SamplingParams(1.0, 1.0, 99),
    SamplingParams(1.0, min_p=0.2),
    SamplingParams(0.8, 0.9, 6, min_p=0.05),
    SamplingParams(1.0, 0.95, min_p=1.0),
]


def with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return replace(params, seed=seed)


def processed(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """Naive processors: what is left of the vocabulary, with its probabilities."""
    scores = [logit / params.temperature for logit in logits]
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if params.top_k:
        order = order[: params.top_k]
    weights = [math.exp(scores[i] - scores[order[0]]) for i in order]
    kept: dict[int, float] = {}
    mass = 0.0
    for token_id, weight in zip(order, weights, strict=True):
        if kept and mass / sum(weights) >= params.top_p:
            break
        kept[token_id] = weight
        mass += weight
    kept = {i: weight for i, weight in kept.items() if weight >= params.min_p * kept[order[0]]}
    mass = sum(kept.values())
    return {token_id: weight / mass for token_id, weight in kept.items()}


def draw(logits: Tensor, params: SamplingParams, count: int) -> list[int]:
    """The tokens of seeds 0..count for one logits row."""
    runs = [SamplingRun(i, i + 1, 17, with_seed(params, i)) for i in range(count)]
    return choose_tokens(logits.expand(count, -1), runs).tolist()


def choose_alone(logits: Tensor, position: int, params: SamplingParams) -> int:
    return int(choose_tokens(logits[None], [SamplingRun(0, 1, position, params)])[0])


def test_greedy_is_argmax() -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, 30)
    logits[2, [4, 9]] = 50.0  # of equal logits the first
    runs = [SamplingRun(0, 4, 0, GREEDY), SamplingRun(4, 7, 3, SamplingParams(0.0, 0.5, 2, 8))]
    assert choose_tokens(logits, runs).tolist() == logits.argmax(dim=-1).tolist()
    assert choose_tokens(logits, runs)[2] == 4
    assert choose_tokens(logits, []).tolist() == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("params", VARIANTS, ids=str)
def test_sampled_distribution(params: SamplingParams) -> None:
    """Chi-square over seeds; and nothing outside the processed vocabulary, ever."""
    torch.manual_seed(3)
    logits = torch.randn(8) * 1.5
    count = 8000
    expected = processed(logits.tolist(), params)
    drawn = draw(logits, params, count)
    assert set(drawn) <= set(expected)
    statistic = sum(
        (drawn.count(token_id) - count * p) ** 2 / (count * p) for token_id, p in expected.items()
    )
    freedom = len(expected) - 1
    # Wilson-Hilferty: the 99.9 % quantile of chi-square.
    limit = (
        freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
        if freedom
        else 0
    )
    assert statistic <= limit


@pytest.mark.parametrize("seed", range(5))
def test_support_equals_naive_processors(seed: int) -> None:
    """With many seeds on a small vocabulary every kept token appears and no removed one."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    logits = (torch.randn(6) * 2).round() / 2  # with ties
    params = SamplingParams(2.5, rng.choice([0.3, 0.6, 0.9, 1.0]), rng.choice([0, 1, 2, 4]))
    params = replace(params, min_p=rng.choice([0.0, 0.0, 0.3]))
    assert set(draw(logits, params, 1500)) == set(processed(logits.tolist(), params))


@pytest.mark.parametrize("temperature", [1e-46, 1e-30, 1e-6])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    """In float32 the smallest ones are 0, and their scores would be no numbers."""
    logits = torch.tensor([-torch.inf, 1.0, 3.0, 2.0, -4.0])
    assert set(draw(logits, SamplingParams(temperature), 50)) == {2}


def test_equal_logits_are_cut_by_token_id() -> None:
    logits = torch.tensor([1.0, 2.0, 2.0, 2.0, -0.0, 0.0])
    assert set(draw(logits, SamplingParams(1.0, 1.0, 2), 300)) == {1, 2}
    assert set(draw(logits, SamplingParams(1.0, 0.5, 0), 300)) == {1, 2}
    assert set(draw(logits * 0, SamplingParams(1.0, 1.0, 3), 300)) == {0, 1, 2}


@pytest.mark.parametrize("resolution", [0.0, 0.5], ids=["distinct", "ties"])
def test_row_does_not_depend_on_its_batch_mates(resolution: float) -> None:
    rng = random.Random(1)
    torch.manual_seed(1)
    logits = torch.randn(40, 33) * 2
    if resolution:
        logits = (logits / resolution).round() * resolution
    cases = [(rng.randrange(1000), with_seed(rng.choice(VARIANTS), i)) for i in range(40)]
    cases[5] = cases[21] = (3, GREEDY)
    alone = [choose_alone(logits[i], *case) for i, case in enumerate(cases)]
    for size in (2, 3, 8, 40):
        order = list(range(40))
        rng.shuffle(order)
        for begin in range(0, 40, size):
            part = order[begin : begin + size]
            runs = [SamplingRun(j, j + 1, *cases[i]) for j, i in enumerate(part)]
            assert choose_tokens(logits[part], runs).tolist() == [alone[i] for i in part]


def test_rows_of_a_run_take_consecutive_positions() -> None:
    torch.manual_seed(4)
    logits, params = torch.randn(5, 50), SamplingParams(1.0, 1.0, 0, 11)
    expected = [choose_alone(logits[i], 100 + i, params) for i in range(5)]
    assert choose_tokens(logits, [SamplingRun(0, 5, 100, params)]).tolist() == expected
    tree = SamplingRun(0, 5, 100, params, (100, 101, 101, 102, 102))
    expected = [
        choose_alone(logits[i], place, params) for i, place in enumerate(tree.positions or ())
    ]
    assert choose_tokens(logits, [tree]).tolist() == expected


def test_same_noise_under_the_same_key() -> None:
    """Equal logits at equal positions and seed give equal tokens: what acceptance rests on."""
    torch.manual_seed(5)
    target = torch.randn(200, 20)
    draft = target + 0.05 * torch.randn(200, 20)
    run = [SamplingRun(0, 200, 0, SamplingParams(1.0, 1.0, 0, 9))]
    agreement = (choose_tokens(target, run) == choose_tokens(draft, run)).float().mean().item()
    assert agreement > 0.9  # independent noise would agree on about 7 %


def test_half_precision_logits() -> None:
    torch.manual_seed(6)
    logits = torch.randn(4, 40).to(torch.bfloat16)
    run = [SamplingRun(0, 4, 0, SamplingParams(1.0, 0.9, 10, 2))]
    assert choose_tokens(logits, run).tolist() == choose_tokens(logits.float(), run).tolist()
