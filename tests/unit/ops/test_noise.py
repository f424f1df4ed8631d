"""Gumbel noise: pinned values, independence of everything but the key, and its distribution."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dflash_ops.noise import gumbel_noise

pytestmark = pytest.mark.unit

MASK = 2**64 - 1
WEYL, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

GOLDEN = {  # (seed, position, token): noise. A change here changes what every seeded request returns.
    (0, 0, 0): -0.0811690,
    (0, 0, 1): -0.2719792,
    (1, 0, 0): 0.1772065,
    (0, 1, 0): -0.6807578,
    (1234, 567, 89): -0.7592590,
    (2**63 - 1, 131071, 151935): 0.0796251,
}


def noise_of(seed: int, position: int, token_ids: list[int]) -> Tensor:
    return gumbel_noise(torch.tensor([seed]), torch.tensor([position]), torch.tensor([token_ids]))[
        0
    ]


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * MIX_1) & MASK
    x = ((x ^ (x >> 27)) * MIX_2) & MASK
    return x ^ (x >> 31)


def unmix(x: int) -> int:
    x = x ^ (x >> 31) ^ (x >> 62)
    x = (x * pow(MIX_2, -1, 2**64)) & MASK
    x = x ^ (x >> 27) ^ (x >> 54)
    x = (x * pow(MIX_1, -1, 2**64)) & MASK
    return x ^ (x >> 30) ^ (x >> 60)


def key_of(seed: int, position: int) -> int:
    return mix((mix((seed + WEYL) & MASK) + position * WEYL) & MASK)


def reference(seed: int, position: int, token_id: int) -> float:
    """The same definition in Python's integers and floats."""
    bits = mix((key_of(seed, position) + (token_id + 1) * WEYL) & MASK)
    return -math.log(-math.log(((bits >> 12) + 0.5) / 2**52))


@pytest.mark.parametrize(("key", "expected"), GOLDEN.items())
def test_pinned_values(key: tuple[int, int, int], expected: float) -> None:
    seed, position, token_id = key
    assert noise_of(seed, position, [token_id]).item() == pytest.approx(expected, abs=1e-6)
    assert reference(*key) == pytest.approx(expected, abs=1e-6)


def test_equals_the_integer_definition() -> None:
    keys = [(s, p, t) for s in (0, 7, 2**40) for p in (0, 3, 9999) for t in (0, 1, 500)]
    for seed, position, token_id in keys:
        actual = noise_of(seed, position, [token_id]).item()
        assert actual == pytest.approx(reference(seed, position, token_id), rel=1e-6)


def test_depends_on_seed_position_and_token_only() -> None:
    tokens = [3, 0, 41, 7]
    whole = gumbel_noise(
        torch.tensor([5, 6, 5]), torch.tensor([10, 10, 11]), torch.tensor([tokens] * 3)
    )
    assert torch.equal(whole[0], noise_of(5, 10, tokens))
    assert torch.equal(whole[2], noise_of(5, 11, tokens))
    order = [2, 0, 3, 1]
    assert torch.equal(noise_of(5, 10, [tokens[i] for i in order]), whole[0][order])
    assert whole.unique().numel() == whole.numel()


def test_neighbouring_keys_are_unrelated() -> None:
    """Swapping two of seed, position and token must not give the same number."""
    values = {noise_of(a, b, [c]).item() for a in range(6) for b in range(6) for c in range(6)}
    assert len(values) == 6**3


def test_extreme_hashes_are_finite() -> None:
    """Of 2**64 hashes the smallest and the largest; their tokens come from inverting the hash."""
    token_ids = []
    for bits in (0, MASK):
        token_id = ((unmix(bits) - key_of(1, 2)) * pow(WEYL, -1, 2**64) - 1) & MASK
        token_ids.append(token_id - 2**64 if token_id >= 2**63 else token_id)
    low, high = noise_of(1, 2, token_ids).tolist()
    assert low == pytest.approx(-math.log(53 * math.log(2)), abs=1e-5)
    assert high == pytest.approx(53 * math.log(2), rel=1e-5)


@pytest.mark.parametrize("axis", ["seed", "position", "token"])
def test_is_standard_gumbel_along_every_axis(axis: str) -> None:
    count = 20_000
    line, zero = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    if axis == "token":
        sample = gumbel_noise(zero[:1], zero[:1] + 3, line[None])[0]
    else:
        seeds, positions = (line, zero) if axis == "seed" else (zero, line)
        sample = gumbel_noise(seeds, positions, zero[:, None])[:, 0]
    sample = sample.to(torch.float64)
    deviation = math.pi / math.sqrt(6)
    assert sample.mean().item() == pytest.approx(0.57721566, abs=4 * deviation / math.sqrt(count))
    assert sample.var().item() == pytest.approx(math.pi**2 / 6, rel=0.05)
    expected = (-(-sample.sort().values).exp()).exp()
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    distance = torch.maximum(steps[1:] - expected, expected - steps[:-1]).max().item()
    assert distance < 1.63 / math.sqrt(count)  # Kolmogorov-Smirnov, 1 %


@pytest.mark.parametrize("shift", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, -1, 0), (0, 1, -1)])
def test_neighbours_are_uncorrelated(shift: tuple[int, int, int]) -> None:
    count = 20_000
    key = torch.arange(count), torch.full((count,), 8), torch.full((count,), 8)
    moved = [axis + by for axis, by in zip(key, shift, strict=True)]
    pair = [gumbel_noise(s, p, t[:, None])[:, 0] for s, p, t in (key, moved)]
    correlation = torch.corrcoef(torch.stack(pair))[0, 1].item()
    assert abs(correlation) < 4 / math.sqrt(count)
