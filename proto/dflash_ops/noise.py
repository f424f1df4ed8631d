"""Counter-based Gumbel noise: a function of (seed, position, token) and nothing else.

Sampling in ``coupled`` mode takes ``argmax(log p + noise)``. Because the noise does not depend on
draws made before, the token at a position is the same whatever the draft block, the batch, or a
restart in between. The hash is the 64-bit finalizer of SplitMix64 (public domain), applied to seed,
position and token in turn; integers are exact on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WEYL = -7046029254386353131  # 0x9E3779B97F4A7C15 as signed 64 bit
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Scramble int64 values; wrap-around is intended."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniform_noise(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number in (0, 1) for each position, independent of every token's noise there.

    Args:
        seeds: ``[T]`` int64.
        positions: ``[T]`` int64.

    Returns:
        ``[T]`` float64.
    """
    no_token = torch.full_like(positions, -1)[:, None]
    return _uniform(seeds, positions, no_token)[:, 0]


def _uniform(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """``[T, n]`` float64, never 0 and never 1."""
    key = _mix(_mix(seeds + _WEYL) + positions * _WEYL)  # [T]
    bits = _mix(key[:, None] + (token_ids + 1) * _WEYL)  # [T, n]
    # 52 bits, centred in their cell: exact in float64, so both logarithms of the noise are finite. (With
    # 53 bits the largest value plus one half would round to 1.)
    return (_shift_right(bits, 12).to(torch.float64) + 0.5) * 2.0**-52


def gumbel_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise of the given tokens at the given positions.

    Args:
        seeds: ``[T]`` int64, one per sampled position.
        positions: ``[T]`` int64, absolute position of the token that is being chosen.
        token_ids: ``[T, n]`` int64 candidates.

    Returns:
        ``[T, n]`` float32.
    """
    uniform = _uniform(seeds, positions, token_ids)
    return -torch.log(-torch.log(uniform)).to(torch.float32)
