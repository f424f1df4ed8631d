"""Rows of all kinds, for tests of attention."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from dflash_ops.visibility import AttentionRow, Visible


def tree(width: int, chance: random.Random) -> tuple[Tensor, list[int]]:
    """Return a random tree as a mask ``[width, width]`` (node, ancestor) and the depths of its nodes."""
    mask = torch.eye(width, dtype=torch.bool)
    depths = [0] * width
    for node in range(1, width):
        parent = chance.randrange(node)
        mask[node] |= mask[parent]
        depths[node] = depths[parent] + 1
    return mask, depths


def random_rows(chance: random.Random, num_pages: int, page_size: int) -> list[AttentionRow]:
    """Return rows of prompts, chains, trees and draft blocks, on pages in a row or anywhere."""
    rows: list[AttentionRow] = []
    offset = 0
    for _ in range(chance.randint(1, 6)):
        context = chance.choice([0, 1, 5, 15, 16, 17, 100, 333])
        width = chance.choice([1, 2, 3, 4, 8, 16, 40, 70])
        count = min(num_pages, -(-(context + width) // page_size))
        context = min(context, count * page_size)
        pages = (
            list(range(count)) if chance.random() < 0.5 else chance.sample(range(num_pages), count)
        )
        kind = chance.choice([Visible.CAUSAL, Visible.ALL, None])
        if kind is None:
            mask, depths = tree(width, chance)
            rows.append(AttentionRow(offset, width, pages, context, mask, depths))
        else:
            rows.append(AttentionRow(offset, width, pages, context, kind))
        offset += width
    return rows
