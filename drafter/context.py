"""From target features to the drafter's context: keys and values of every draft layer in one go.

The same mathematics as ``DraftModel.project`` and ``context_kv``, which training uses: all layers' key
and value projections read the same input, so here they are one product.

Shape letters: T tokens, K tapped target layers, H hidden, L draft layers, G key/value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dflash_ops.norms import RootMeanSquareNorm
from dflash_ops.products import product_of
from dflash_ops.rotary import Rotation
from drafter.model import DraftModel


class FeatureProjection:
    """The first half, which every layer shares: ``hidden_norm(fc(features))``.

    It can run where the features are made, so that a row of ``H`` travels and not one of ``K*H``.

    Args:
        model: a draft model that still has its weights.
        factor: multiplies the result; a power of two, so that it can be given later as well.
    """

    def __init__(self, model: DraftModel, factor: float = 1.0) -> None:
        self._product = product_of(model.fc.weight.detach())
        self._norm = RootMeanSquareNorm.of(model.hidden_norm, factor)

    def __call__(self, features: Tensor) -> Tensor:
        """Target features ``[T, K*H]`` -> context ``[T, H]``, times the factor."""
        return self._norm(self._product(features))


class ContextProjection:
    """Inference-only projection of features; keeps copies of the weights it needs.

    Args:
        model: a draft model that still has its weights.
        is_projected: features have gone through a ``FeatureProjection`` of the same model.
    """

    def __init__(self, model: DraftModel, is_projected: bool = False) -> None:
        layers: list[Any] = [layer.self_attn for layer in model.layers]
        self._num_layers = len(layers)
        self._head_dim: int = layers[0].head_dim
        keys = [layer.k_proj for layer in layers]
        values = [layer.v_proj for layer in layers]
        bias = None
        if keys[0].bias is not None:
            bias = torch.cat([layer.bias.detach() for layer in keys + values])
        weight = torch.cat([layer.weight.detach() for layer in keys + values])
        self._kv_product = product_of(weight, bias)
        self._project: FeatureProjection | None = None
        if not is_projected:
            self._project = FeatureProjection(model, self._kv_product.input_scale)
        self._num_kv_heads = keys[0].weight.shape[0] // self._head_dim
        key_norms = [
            layer.k_norm.weight.detach().expand(self._num_kv_heads, -1) for layer in layers
        ]
        self._key_norm = RootMeanSquareNorm(
            torch.cat(key_norms),  # [L * G, D]
            layers[0].k_norm.variance_epsilon,
        )

    def __call__(self, features: Tensor, rotation: Rotation) -> Tensor:
        """Target features ``[T, K*H]``, or ``[T, H]`` once projected -> ``[L, T, 2, G, D]`` (rotated
        keys, then values)."""
        num_tokens = features.shape[0]
        if self._project is None:
            projected = self._kv_product(features)
        else:
            projected = self._kv_product.of_scaled(self._project(features))
        projected = projected.view(num_tokens, -1, self._head_dim)
        keys, values = projected.chunk(2, dim=1)  # [T, L * G, D]
        shape = (num_tokens, self._num_layers, self._num_kv_heads, self._head_dim)
        kv = torch.stack(
            [rotation.rotate(self._key_norm(keys)).view(shape), values.view(shape)], dim=2
        )
        return kv.transpose(0, 1)
