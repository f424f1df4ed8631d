"""Rotary position embedding from tables, so that a pass gathers two rows instead of computing them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FIRST_POSITIONS = 1024


class Rotation:
    """Cosine and sine of a pass's positions; built once for all layers.

    Args:
        cos: ``[T, 1, D]``.
        sin: ``[T, 1, D]``, its first half negated: the sign of the usual ``rotate_half`` sits here, so
            that rotating is one product and one addition.
    """

    __slots__ = ("_cos", "_half", "_sin")

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self._cos, self._sin = cos, sin
        self._half = cos.shape[-1] // 2

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """``cos`` and ``sin``, both ``[1, T, D]``, as transformers' layers want them."""
        sin = torch.cat([-self._sin[..., : self._half], self._sin[..., self._half :]], dim=-1)
        return self._cos.transpose(0, 1), sin.transpose(0, 1)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate ``[T, heads, D]``."""
        half = self._half
        swapped = torch.cat([x[..., half:], x[..., :half]], dim=-1)
        return torch.addcmul(x * self._cos, swapped, self._sin)


class RotaryTables:
    """Cosines and sines of all positions seen so far.

    Owner: one engine's thread; ``at`` grows the tables.

    Args:
        rotary: the model's rotary embedding; a position's frequencies must not depend on the others of
            its pass (no dynamic scaling).
        like: a tensor with the model's device and type.
        kind: of layers, for models whose kinds of layers rotate differently.
    """

    def __init__(self, rotary: Any, like: Tensor, kind: str | None = None) -> None:
        self._rotary = rotary
        self._like = like
        self._kind = () if kind is None else (kind,)
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._fill(FIRST_POSITIONS)

    def reserve(self, num_positions: int) -> None:
        """Have positions ``[0, num_positions)`` ready for captured passes. Mutates.

        Such passes read these tables where they are now, so they stay even if larger ones take their place.
        """
        if num_positions > self._cos.shape[0]:
            self._fill(num_positions)
        self._kept.append((self._cos, self._sin))

    def at(self, positions: list[int] | Tensor) -> Rotation:
        """The rotation of absolute positions ``[T]``; T is at least 1.

        Positions on the device, int64, must have been reserved.
        """
        if isinstance(positions, Tensor):
            index = positions
        else:
            if (last := max(positions)) >= self._cos.shape[0]:
                self._fill(2 * last)
            index = torch.tensor(positions, device=self._like.device)
        return Rotation(self._cos.index_select(0, index), self._sin.index_select(0, index))

    @torch.inference_mode()
    def _fill(self, num_positions: int) -> None:
        positions = torch.arange(num_positions, device=self._like.device)
        cos, sin = self._rotary(self._like, positions[None], *self._kind)  # [1, P, D]
        if (
            type(self._rotary).__name__ == "GptOssRotaryEmbedding"
        ):  # gives one half, the other is equal
            cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)
        half = sin.shape[-1] // 2
        self._cos = cos.transpose(0, 1)  # [P, 1, D]
        self._sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1).transpose(0, 1)
