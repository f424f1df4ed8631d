"""Which kind of drafter a name in the config stands for, from JSON files alone. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

NGRAM_DRAFTER = "ngram"
"""In place of a model: prompt lookup."""


class DrafterKind(StrEnum):
    """How a drafter drafts."""

    DFLASH = "dflash"
    EAGLE3 = "eagle3"
    NGRAM = "ngram"

    @property
    def reads_tokens(self) -> bool:
        """Whether ingests tell it the tokens of their positions."""
        return self is not DrafterKind.DFLASH

    @property
    def is_chain(self) -> bool:
        """Whether it drafts token by token: no checkpoint says then how many."""
        return self is not DrafterKind.DFLASH


def kind_of(values: Mapping[str, Any]) -> DrafterKind:
    """The kind of a checkpoint with this ``config.json``; what is not EAGLE-3 must be DFlash."""
    names = [values.get("speculators_model_type"), *(values.get("architectures") or [])]
    is_eagle3 = any("eagle3" in str(name).lower() for name in names)
    return DrafterKind.EAGLE3 if is_eagle3 else DrafterKind.DFLASH


def flat_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """A drafter's config with the decoder's keys at top level, in either layout."""
    return {**(values.get("transformer_layer_config") or {}), **values}


def trained_block_size(values: Mapping[str, Any]) -> int:
    """The block size of a DFlash checkpoint; layouts differ in what they leave out."""
    nested = values.get("dflash_config") or {}
    usual = 8 if "speculators_model_type" in values else 16
    return int(nested.get("block_size", values.get("block_size", usual)))
