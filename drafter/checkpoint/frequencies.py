"""How often tokens occur in a corpus: what a draft vocabulary is ranked by."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from dflash_wire.errors import ConfigError

TEXT_KEYS = ("text", "response", "answer", "prompt", "question")
ID_KEYS = ("response_ids", "input_ids")


def count_tokens(files: Sequence[Path], target: Path, vocab_size: int) -> Tensor:
    """Count the tokens of a corpus.

    Args:
        files: ``*.jsonl`` with one object a line (token ids in ``response_ids`` or ``input_ids``, the latter
            under ``loss_mask`` if there is one; else the contents of ``messages``; else text), or plain text.
        target: folder whose ``tokenizer.json`` encodes text.
        vocab_size: of the target.

    Returns:
        ``[vocab_size]`` int64.

    Raises:
        ConfigError: a file is not what it should be, or has ids outside the vocabulary.
    """
    encoder = _Encoder(target)
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for file in files:
        if not file.is_file():
            raise ConfigError(f"no corpus file {file}")
        for ids in _sequences(file, encoder):
            found = torch.tensor(ids, dtype=torch.int64)
            if found.numel() and not 0 <= int(found.min()) <= int(found.max()) < vocab_size:
                raise ConfigError(f"{file} has token ids outside the vocabulary of {vocab_size}")
            counts += torch.bincount(found, minlength=vocab_size)
    if not counts.any():
        raise ConfigError("the corpus has no tokens")
    return counts


class _Encoder:
    """A tokenizer that is loaded when text first needs it."""

    def __init__(self, target: Path) -> None:
        self._file = target / "tokenizer.json"
        self._tokenizer: Tokenizer | None = None

    def __call__(self, text: str) -> list[int]:
        if self._tokenizer is None:
            if not self._file.is_file():
                raise ConfigError(f"the corpus is text, but there is no {self._file}")
            self._tokenizer = Tokenizer.from_file(str(self._file))
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _sequences(file: Path, encoder: _Encoder) -> Iterator[list[int]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if file.suffix != ".jsonl":
                yield encoder(line)
            elif line.strip():
                try:
                    values = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ConfigError(f"{file}, line {number} is not JSON: {error}") from error
                yield _ids(values, encoder, f"{file}, line {number}")


def _ids(values: Any, encoder: _Encoder, where: str) -> list[int]:
    if not isinstance(values, dict):
        raise ConfigError(f"{where} is not an object")
    for key in ID_KEYS:
        if key in values:
            ids = list(values[key])
            mask = values.get("loss_mask") if key == "input_ids" else None
            return ids if mask is None else [i for i, m in zip(ids, mask, strict=True) if m]
    texts = [values[key] for key in TEXT_KEYS if isinstance(values.get(key), str)]
    texts += [m["content"] for m in values.get("messages", []) if isinstance(m.get("content"), str)]
    if not texts:
        raise ConfigError(f"{where} has none of {', '.join((*ID_KEYS, 'messages', *TEXT_KEYS))}")
    return [token for text in texts for token in encoder(text)]
