"""Which targets give a token the same bits whatever stands beside it in a pass.

Norms, activations and packed products work row by row; attention does in ``dflash_ops.compiled_attention``,
and in ``dflash_ops.tokenwise`` where that is not to be had. Dense
products and mixtures of experts do not: how they sum depends on how many rows there are.
"""

from __future__ import annotations

from typing import Any

from dflash_ops.family_layers import PackedGemmaLayer
from dflash_ops.fused_layer import FusedDecoderLayer
from dflash_ops.products import HalfProduct
from dflash_ops.tokenwise import ALIGNED_DIMS
from dflash_wire.errors import ConfigError
from verifier.target import TargetModel

PRODUCTS = ("_qkv", "_out", "_gate_up", "_down")
KINDS = (FusedDecoderLayer, PackedGemmaLayer)


def check_deterministic(target: TargetModel) -> None:
    """Refuse what cannot be deterministic.

    Raises:
        ConfigError: with the reason.
    """
    reason = _obstacle(target)
    if reason is not None:
        raise ConfigError(f"engine.deterministic is not possible here: {reason}")


def _obstacle(target: TargetModel) -> str | None:
    if target.device.type != "cpu":
        return f"it needs a CPU, not {target.device.type!r}"
    if target.head_dim % ALIGNED_DIMS:
        return f"heads of {target.head_dim} are not a multiple of {ALIGNED_DIMS}"
    layers: list[Any] = list(target.layers)
    for layer in layers:
        if type(layer) not in KINDS:
            return "mixtures of experts, and layers that are not fused, depend on the batch"
    products = [getattr(layer, name) for layer in layers for name in PRODUCTS] + [target.head]
    if not all(isinstance(product, HalfProduct) for product in products):
        return (
            "products depend on the batch unless weights are packed in half precision, which takes float32 "
            "(model.dtype) and weights that 16 bits hold"
        )
    return None
