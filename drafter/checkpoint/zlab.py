"""z-lab's config: the keys that the rest of the drafter reads, checked."""

from __future__ import annotations

from typing import Any

from dflash_wire.errors import ConfigError
from drafter.checkpoint.keys import (
    DECODER_KEYS,
    DRAFT_KEYS,
    GENERAL_KEYS,
    PAIR_KEYS,
    refuse_other_decoders,
    refuse_unknown,
)

ARCHITECTURE = "DFlashDraftModel"
ARCHITECTURE_2 = "DFlash2DraftModel"
DFLASH_2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def check_zlab(values: dict[str, Any], where: str) -> None:
    """Check a z-lab config's architecture and keys; values are checked by ``drafter.settings``.

    Raises:
        ConfigError: it is of another kind, or has keys that are not known.
    """
    architectures = values.get("architectures")
    if architectures not in ([ARCHITECTURE], [ARCHITECTURE_2]):
        raise ConfigError(
            f"{where}: architectures is {architectures}, expected ['{ARCHITECTURE}'] or "
            f"['{ARCHITECTURE_2}']"
        )
    refuse_other_decoders(values, where)
    nested = values.get("dflash_config") or {}
    known = DECODER_KEYS | GENERAL_KEYS | DRAFT_KEYS | PAIR_KEYS | {"dflash_config"}
    refuse_unknown(values, known, where)
    refuse_unknown(nested, DRAFT_KEYS, f"{where}: dflash_config")
    if architectures == [ARCHITECTURE_2]:
        missing = [key for key in DFLASH_2_KEYS if nested.get(key, values.get(key)) is None]
        if missing:
            raise ConfigError(f"{where}: {ARCHITECTURE_2} needs {', '.join(missing)}")


def architecture_of(values: dict[str, Any]) -> str:
    """The architecture that a config's keys make it."""
    nested = values.get("dflash_config") or {}
    has_more = any(nested.get(key, values.get(key)) is not None for key in DFLASH_2_KEYS)
    return ARCHITECTURE_2 if has_more else ARCHITECTURE
