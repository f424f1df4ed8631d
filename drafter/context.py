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


class ContextProjection:
    """Inference-only projection of features; keeps copies of the weights it needs.

    Args:
        model: a draft model that still has its weights.
    """

    def __init__(self, model: DraftModel) -> None:
        layers: list[Any] = [layer.self_attn for layer in model.layers]
        self._num_layers = len(layers)
        self._head_dim: int = layers[0].head_dim
        self._feature_product = product_of(model.fc.weight.detach())
        keys = [layer.k_proj for layer in layers]
        values = [layer.v_proj for layer in layers]
        bias = None
        if keys[0].bias is not None:
            bias = torch.cat([layer.bias.detach() for layer in keys + values])
        weight = torch.cat([layer.weight.detach() for layer in keys + values])
        self._kv_product = product_of(weight, bias)
        self._hidden_norm = RootMeanSquareNorm.of(model.hidden_norm, self._kv_product.input_scale)
        self._num_kv_heads = keys[0].weight.shape[0] // self._head_dim
        key_norms = [
            layer.k_norm.weight.detach().expand(self._num_kv_heads, -1) for layer in layers
        ]
        self._key_norm = RootMeanSquareNorm(
            torch.cat(key_norms),  # [L * G, D]
            layers[0].k_norm.variance_epsilon,
        )

    def __call__(self, features: Tensor, rotation: Rotation) -> Tensor:
        """Target features ``[T, K*H]`` -> ``[L, T, 2, G, D]`` (rotated keys, then values)."""
        num_tokens = features.shape[0]
        context = self._hidden_norm(self._feature_product(features))
        projected = self._kv_product.of_scaled(context).view(num_tokens, -1, self._head_dim)
        keys, values = projected.chunk(2, dim=1)  # [T, L * G, D]
        shape = (num_tokens, self._num_layers, self._num_kv_heads, self._head_dim)
        kv = torch.stack(
            [rotation.rotate(self._key_norm(keys)).view(shape), values.view(shape)], dim=2
        )
        return kv.transpose(0, 1)
