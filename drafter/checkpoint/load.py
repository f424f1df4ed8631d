"""From a checkpoint to a draft model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config

from dflash_wire.errors import ConfigError
from drafter.checkpoint.files import Checkpoint, read_checkpoint
from drafter.eagle3.model import Eagle3Model
from drafter.model import DraftModel

OWN_HEAD = "has_own_lm_head"
OWN_TENSORS = {
    OWN_HEAD: "lm_head.weight",
    "has_own_embed_tokens": "embed_tokens.weight",
}
DFLASH_2_TENSORS = dict.fromkeys(
    ("_conv.", "candidate_selector."), "; these are DFlash 2's, but config.json lacks its keys"
)
"""Parts of their names, and what is wrong where they are not expected."""


def load_draft_model(path: Path, dtype: torch.dtype, attn_implementation: str) -> DraftModel:
    """Load a local drafter checkpoint, z-lab's or speculators' (safetensors only).

    Raises:
        ConfigError: files are missing, tensors do not match the config, or the config has something that is
            not implemented.
    """
    model = build_model(read_checkpoint(path), attn_implementation, str(path))
    return model.to(dtype).eval()


def build_model(checkpoint: Checkpoint, attn_implementation: str, where: str) -> DraftModel:
    """Build the model that a checkpoint describes, in float32.

    Raises:
        ConfigError: tensors do not match the config, or it has something that is not implemented.
    """
    model = DraftModel(make_config(checkpoint, attn_implementation, where))
    load_tensors(model, checkpoint.tensors, where, DFLASH_2_TENSORS)
    model.mask_embedding = checkpoint.mask_embedding
    return model


def load_tensors(
    model: DraftModel | Eagle3Model,
    tensors: dict[str, Tensor],
    where: str,
    hints: Mapping[str, str] | None = None,
) -> None:
    """Give a model a checkpoint's tensors: all that it has, and no others but ``t2d``.

    Args:
        model: its weights are overwritten.
        tensors: by the model's names.
        where: for messages.
        hints: what a message ends with if such a part is in the name of a tensor that does not belong there.

    Raises:
        ConfigError: tensors do not match the model, or do not agree about the vocabulary.
    """
    own = {name: tensor for name, tensor in tensors.items() if name != "t2d"}
    try:
        missing, unexpected = model.load_state_dict(own, strict=False)
    except RuntimeError as error:  # a shape differs
        raise ConfigError(f"{where}: tensors do not match config.json: {error}") from error
    if missing or unexpected:
        told = (hint for part, hint in (hints or {}).items() if any(part in n for n in unexpected))
        raise ConfigError(
            f"{where}: missing tensors {missing}, unexpected tensors {unexpected}{next(told, '')}"
        )
    check_vocabulary(model, tensors.get("t2d"), where)


def make_config(checkpoint: Checkpoint, attn_implementation: str, where: str) -> Qwen3Config:
    """The config of a checkpoint, completed by what its tensors tell.

    Raises:
        ConfigError: transformers refuses it.
    """
    values: dict[str, Any] = dict(checkpoint.values)
    nested = values.get("dflash_config") or {}
    for key, tensor in OWN_TENSORS.items():
        if tensor in checkpoint.tensors and nested.get(key, values.get(key)) is None:
            values[key] = True
    try:
        config = Qwen3Config.from_dict(values)
    except Exception as error:  # transformers has several kinds for values of a wrong type
        raise ConfigError(f"{where}: config.json is not a valid Qwen3 config: {error}") from error
    config._attn_implementation = attn_implementation
    return config


def check_vocabulary(model: DraftModel | Eagle3Model, mapped: Tensor | None, where: str) -> None:
    """Check that draft tokens are different ones of the target's, and that both maps agree.

    Args:
        model: with its weights.
        mapped: ``t2d``, of the target's tokens those that are drafted; None: the checkpoint has none.
        where: for messages.

    Raises:
        ConfigError: that is not so.
    """
    token_ids, vocab_size = model.draft_token_ids(), model.config.vocab_size
    if token_ids is None:
        if mapped is not None and not bool(mapped.all()):
            raise ConfigError(
                f"{where}: t2d leaves {int((~mapped.bool()).sum())} tokens out, but draft_vocab_size is "
                f"the vocabulary's {vocab_size}"
            )
        return
    if int(token_ids.min()) < 0 or int(token_ids.max()) >= vocab_size:
        raise ConfigError(
            f"{where}: d2t leads to tokens {int(token_ids.min())} to {int(token_ids.max())}, outside the "
            f"vocabulary of {vocab_size} tokens"
        )
    is_drafted = torch.zeros(vocab_size, dtype=torch.bool)
    is_drafted[token_ids] = True
    if int(is_drafted.sum()) < token_ids.shape[0]:
        raise ConfigError(f"{where}: d2t leads to the same token more than once")
    if mapped is not None and not torch.equal(mapped.bool(), is_drafted):
        raise ConfigError(f"{where}: t2d and d2t do not agree")
