"""What a pass takes at least on a card of measured ceilings."""

from __future__ import annotations

from typing import Any, NamedTuple

from services.gpu_check.pair import RandomPair, layer_elements
from services.gpu_check.session import Ceilings


class Floor(NamedTuple):
    """Of one pass, in ms; it cannot be faster than either."""

    bytes_ms: float
    """To read weights and context once."""
    flops_ms: float
    """To do its products."""

    @property
    def ms(self) -> float:
        """The higher one."""
        return max(self)


def floor_of(
    pair: RandomPair, ceilings: Ceilings, part: str, width: int, rows: int, context: int
) -> Floor:
    """The floor of a ``verify`` or ``draft`` pass.

    Bytes: all layers and the head once, and the rows' keys and values. Products: of all tokens with these
    matrices, where a draft pass has no logits for anchors, and queries with context and back.
    """
    config = pair.shape.target if part == "verify" else pair.shape.drafter
    item = pair.borrowed.head.element_size()
    tokens = rows * width
    num_logits = tokens if part == "verify" else rows * (width - 1)
    num_bytes = pair.parameter_bytes(part) + rows * context * token_bytes(config, item)
    products = tokens * layer_elements(config) + num_logits * pair.borrowed.head.numel()
    attended = config["num_attention_heads"] * config["head_dim"] * config["num_hidden_layers"]
    flops = 2 * products + 4 * tokens * context * attended
    return Floor(num_bytes / ceilings.bytes_per_ms, flops / ceilings.flops_per_ms)


def token_bytes(config: dict[str, Any], item: int) -> int:
    """Keys and values of one position in all layers."""
    heads = config["num_key_value_heads"] * config["head_dim"]
    return int(2 * heads * config["num_hidden_layers"] * item)
