"""Training data: JSONL rows, length-bucketed batches, an order that can be resumed anywhere.

Shape letters: R rows of a batch, T tokens of its longest row.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_wire.errors import ConfigError

LENGTH_JITTER = 16  # tokens of noise in the length sort, so that groups differ between epochs


@dataclass(frozen=True)
class TrainingRow:
    """One sequence; ``loss_mask`` is true on the tokens that are supervised (the response)."""

    input_ids: list[int]
    loss_mask: list[bool]


@dataclass(frozen=True)
class Batch:
    """Right-padded rows.

    Attributes:
        row_ids: index of each row in the data set.
        input_ids: ``[R, T]`` int64.
        loss_mask: ``[R, T]`` bool, false on padding.
        lengths: ``[R]`` int64.
    """

    row_ids: list[int]
    input_ids: Tensor
    loss_mask: Tensor
    lengths: Tensor


def parse_row(values: dict[str, Any], max_length: int) -> TrainingRow | None:
    """Turn one JSON object into a row cut to ``max_length``; None when nothing can be learnt from it.

    Accepted forms: ``{"input_ids", "loss_mask"}`` and ``{"prompt_ids", "response_ids"}``; other keys
    are ignored. An anchor and its first label both have to be supervised, so a row needs two
    neighbouring supervised tokens.

    Raises:
        ConfigError: neither form, or lengths differ.
    """
    if "input_ids" in values and "loss_mask" in values:
        ids, mask = list(values["input_ids"]), [bool(m) for m in values["loss_mask"]]
        if len(ids) != len(mask):
            raise ConfigError(f"{len(ids)} input_ids but {len(mask)} loss_mask entries")
    elif "prompt_ids" in values and "response_ids" in values:
        prompt, response = list(values["prompt_ids"]), list(values["response_ids"])
        ids, mask = prompt + response, [False] * len(prompt) + [True] * len(response)
    else:
        raise ConfigError(
            'a row needs "input_ids" and "loss_mask", or "prompt_ids" and "response_ids"'
        )
    ids, mask = ids[:max_length], mask[:max_length]
    has_anchor = any(a and b for a, b in pairwise(mask))
    return TrainingRow(ids, mask) if has_anchor else None


def read_rows(path: Path, max_length: int) -> list[TrainingRow]:
    """Read a JSONL file.

    Raises:
        ConfigError: a line is not a valid row (the message names the line), or none is usable.
    """
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = parse_row(json.loads(line), max_length)
            except (ConfigError, ValueError, TypeError) as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error
            if row is not None:
                rows.append(row)
    if not rows:
        raise ConfigError(f"{path} has no row with two neighbouring supervised tokens")
    return rows


def collate(rows: list[TrainingRow], row_ids: list[int]) -> Batch:
    """Pad the rows named by ``row_ids`` on the right."""
    chosen = [rows[i] for i in row_ids]
    longest = max(len(row.input_ids) for row in chosen)
    input_ids = torch.zeros(len(chosen), longest, dtype=torch.long)  # [R, T]
    loss_mask = torch.zeros(len(chosen), longest, dtype=torch.bool)  # [R, T]
    for index, row in enumerate(chosen):
        input_ids[index, : len(row.input_ids)] = torch.tensor(row.input_ids)
        loss_mask[index, : len(row.input_ids)] = torch.tensor(row.loss_mask)
    lengths = torch.tensor([len(row.input_ids) for row in chosen])
    return Batch(row_ids, input_ids, loss_mask, lengths)


class BatchPlan:
    """Which rows a step sees: a pure function of the seed and the step.

    Owner: the trainer. Rows of like length share a batch of at most ``tokens_per_step`` padded
    tokens; groups and their order are redrawn every epoch.
    """

    def __init__(self, lengths: list[int], tokens_per_step: int, seed: int) -> None:
        self._lengths = lengths
        self._tokens_per_step = tokens_per_step
        self._seed = seed
        self._epochs: dict[int, list[list[int]]] = {}

    def epoch(self, index: int) -> list[list[int]]:
        """Return the groups of row ids of one epoch, in order."""
        if index not in self._epochs:
            self._epochs[index] = self._draw(random.Random(f"{self._seed}/{index}"))
        return self._epochs[index]

    def locate(self, step: int) -> tuple[int, int]:
        """Return (epoch, index of the group within it) of a 0-based step."""
        epoch = 0
        while step >= len(self.epoch(epoch)):
            step -= len(self.epoch(epoch))
            epoch += 1
        return epoch, step

    def num_steps(self, epochs: int) -> int:
        """Return the steps of the first ``epochs`` epochs."""
        return sum(len(self.epoch(index)) for index in range(epochs))

    def _draw(self, rng: random.Random) -> list[list[int]]:
        noisy = [
            (length + rng.random() * LENGTH_JITTER, i) for i, length in enumerate(self._lengths)
        ]
        groups: list[list[int]] = []
        group: list[int] = []
        longest = 0
        for _, row_id in sorted(noisy):
            longest = max(longest, self._lengths[row_id])
            if group and longest * (len(group) + 1) > self._tokens_per_step:
                groups.append(group)
                group, longest = [], self._lengths[row_id]
            group.append(row_id)
        groups.append(group)
        rng.shuffle(groups)
        return groups
