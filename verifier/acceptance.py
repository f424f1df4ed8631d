"""Acceptance: how much of a draft the target keeps.

Pure functions on ids. In ``coupled`` mode (greedy included) the target's token at every node is
already chosen; a draft is kept while it *is* that token. A row is a small tree given by parent
pointers; a chain is the special case in which every draft follows the one before it.

Nodes: 0 is the anchor, ``n`` the ``n``-th draft token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The accepted path of one row.

    ``nodes`` starts at the anchor (0) and lists the accepted drafts in order; ``token_ids`` are the
    accepted drafts followed by the bonus token, so both have the same length, at least 1.
    """

    nodes: list[int]
    token_ids: list[int]


def chain_parents(num_draft_tokens: int) -> list[int]:
    """Parent pointers of a chain: every draft follows the node before it."""
    return list(range(num_draft_tokens))


def accept(
    draft_token_ids: Sequence[int], target_token_ids: Sequence[int], parents: Sequence[int]
) -> Acceptance:
    """Follow the target's own choices through the tree until no draft matches.

    Args:
        draft_token_ids: N guesses.
        target_token_ids: N + 1 choices of the target, one after each node.
        parents: N parent nodes; ``parents[j] <= j``.

    Returns:
        The accepted path and its bonus token; never empty.
    """
    children: dict[tuple[int, int], int] = {}
    for j, (token_id, parent) in enumerate(zip(draft_token_ids, parents, strict=True)):
        children.setdefault((parent, token_id), j + 1)
    node, nodes, token_ids = 0, [0], []
    while True:
        token_id = target_token_ids[node]
        token_ids.append(token_id)
        child = children.get((node, token_id))
        if child is None:
            return Acceptance(nodes, token_ids)
        nodes.append(child)
        node = child


def chain_within(parents: Sequence[int], nodes: Sequence[int]) -> tuple[int, int]:
    """Return how the chain of first children fared in a tree: trials and hits.

    Args:
        parents: N parent nodes; of the children of a node the likeliest comes first.
        nodes: the accepted path, anchor first.

    Returns:
        tokens of the chain up to and with the first rejected one, and how many were accepted.
    """
    first: dict[int, int] = {}
    for j, parent in enumerate(parents):
        first.setdefault(parent, j + 1)
    for depth, node in enumerate(nodes):
        child = first.get(node)
        if child is None:
            return depth, depth
        if depth + 1 == len(nodes) or nodes[depth + 1] != child:
            return depth + 1, depth
    return 0, 0


def depths(parents: Sequence[int]) -> list[int]:
    """Distance of every node from the anchor: N + 1 values, the first is 0."""
    result = [0]
    for parent in parents:
        result.append(result[parent] + 1)
    return result


def ancestor_mask(parents: Sequence[int]) -> Tensor:
    """Which nodes a node may attend to: itself and its ancestors.

    Returns:
        ``[N + 1, N + 1]`` bool (query, key); for a chain the lower triangle.
    """
    size = len(parents) + 1
    seen = [1]  # one integer per node, bit k set if it sees node k
    for j, parent in enumerate(parents):
        seen.append(seen[parent] | 1 << (j + 1))
    num_bytes = -(-size // 8)
    packed = b"".join(bits.to_bytes(num_bytes, "little") for bits in seen)
    rows = np.frombuffer(packed, dtype=np.uint8).reshape(size, num_bytes)
    mask = np.unpackbits(rows, axis=1, count=size, bitorder="little")
    return torch.from_numpy(mask.view(np.bool_))
