"""Trees by parent pointers: any, and the tokens on the way to a node."""

from __future__ import annotations

import random


def random_tree(rng: random.Random, num_drafts: int) -> list[int]:
    return [rng.randint(0, j) for j in range(num_drafts)]


def path_of(node: int, drafts: list[int], parents: list[int]) -> list[int]:
    path: list[int] = []
    while node:
        path.insert(0, drafts[node - 1])
        node = parents[node - 1]
    return path
