"""A smaller draft vocabulary: the head then scores only the tokens that are frequent.

The target's output does not depend on it; a token that is not in the draft vocabulary is never drafted, and
the cycle ends there with the target's own.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from dflash_wire.errors import ConfigError
from drafter.checkpoint.files import Checkpoint

HEAD = "lm_head.weight"


def frequent_tokens(
    counts: Tensor, size: int, always: Collection[int] = (), never: Collection[int] = ()
) -> Tensor:
    """The most frequent tokens; of equally frequent ones those with the smaller id.

    Args:
        counts: ``[V]`` int64.
        size: tokens of the draft vocabulary.
        always: ids that are in it whatever their counts.
        never: ids that are not.

    Returns:
        ``[size]`` int64, ascending.

    Raises:
        ConfigError: the vocabulary has not so many tokens.
    """
    if not len(set(always)) <= size <= counts.shape[0] - len(set(never)):
        raise ConfigError(
            f"a draft vocabulary of {size} tokens out of {counts.shape[0]} is not possible: "
            f"{len(set(always))} are always in it, {len(set(never))} never"
        )
    ranks = counts.clone()
    ranks[list(always)] = torch.iinfo(torch.int64).max
    ranks[list(never)] = -1
    order = ranks.sort(descending=True, stable=True).indices
    return order[:size].sort().values


def ending_tokens(target: Path) -> set[int]:
    """The ids that end a target's answers; a drafter without them wastes the last cycle of each."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        file = target / name
        if file.is_file():
            found = json.loads(file.read_text()).get("eos_token_id")
            ids |= set(found) if isinstance(found, list) else {found} - {None}
    return ids


def trimmed(checkpoint: Checkpoint, token_ids: Tensor) -> Checkpoint:
    """The same drafter with a draft vocabulary.

    Args:
        checkpoint: without one.
        token_ids: ``[v]`` int64, ascending.

    Raises:
        ConfigError: it has one already.
    """
    tensors = dict(checkpoint.tensors)
    if "d2t" in tensors:
        raise ConfigError("this drafter has a draft vocabulary already")
    tensors["d2t"] = token_ids - torch.arange(token_ids.shape[0])
    if HEAD in tensors:
        tensors[HEAD] = tensors[HEAD][token_ids]
    values = {**checkpoint.values, "draft_vocab_size": token_ids.shape[0]}
    nested = dict(values.get("dflash_config") or {})
    nested.pop("draft_vocab_size", None)
    values["dflash_config"] = nested
    return Checkpoint(checkpoint.layout, values, tensors, checkpoint.mask_embedding)
