"""Which targets can be split over ranks; looks at configs alone and imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_wire.errors import ConfigError

SHARDABLE_MODEL_TYPES = ("qwen3", "llama")
SPLIT_COUNTS = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def check_shardable(config: Mapping[str, Any], num_ranks: int) -> None:
    """Refuse a target that cannot be split evenly.

    Args:
        config: the target's ``config.json``.
        num_ranks: at least 1; 1 splits nothing and fits every target.

    Raises:
        ConfigError: naming what does not fit.
    """
    if num_ranks == 1:
        return
    family = config.get("model_type")
    if family not in SHARDABLE_MODEL_TYPES:
        raise ConfigError(
            f"verifier.tensor_parallel {num_ranks}: target family {family!r} cannot be split; only "
            f"{', '.join(SHARDABLE_MODEL_TYPES)} can"
        )
    if config.get("quantization_config"):
        raise ConfigError(
            f"verifier.tensor_parallel {num_ranks}: quantised weights cannot be split"
        )
    heads = config.get("num_attention_heads")
    for name in SPLIT_COUNTS:
        count = config.get(name) or (heads if name == "num_key_value_heads" else None)
        if not isinstance(count, int) or count % num_ranks:
            raise ConfigError(
                f"verifier.tensor_parallel {num_ranks} does not divide the target's {name} {count}"
            )
