"""Acceptance without the host: ``verifier.acceptance.accept`` on tensors, for all rows of a pass at once.

Shape letters: R rows, W tokens of a row: its anchor, then drafts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class DeviceAcceptance(NamedTuple):
    """The accepted paths of a pass's rows."""

    is_kept: Tensor
    """``[R, W]`` bool: tokens on the path, the anchor among them. False for all of a row without tokens."""
    nodes: Tensor
    """``[R, W]`` int64: the path, then zeros."""
    counts: Tensor
    """``[R]`` int64: tokens on the path, which is how many are committed."""
    token_ids: Tensor
    """``[R, W]`` int64: what the target chose behind each of ``nodes``, the accepted drafts and the bonus;
    then anything."""


def accept_on_device(
    token_ids: Tensor,
    chosen: Tensor,
    parents: Tensor,
    depths: Tensor,
    visible: Tensor,
    num_tokens: Tensor,
) -> DeviceAcceptance:
    """Keep what the target chose itself; of equal siblings the first.

    Args:
        token_ids: ``[R, W]`` int64: anchor, then drafts.
        chosen: ``[R, W]`` int64, the target's choice behind each token.
        parents: ``[R, W]`` int64, the token that each follows; of the anchor itself.
        depths: ``[R, W]`` int64, how far each token is behind the anchor.
        visible: ``[R, W, W]`` bool (token, ancestor), each its own ancestor.
        num_tokens: ``[R]`` int64; what is behind them is no token.
    """
    width = token_ids.shape[1]
    place = torch.arange(width, device=token_ids.device)
    is_token = place < num_tokens[:, None]
    agrees = (token_ids == chosen.gather(1, parents)) | (place == 0)
    # A token that an earlier one already stands for, behind the same parent.
    repeats = (token_ids[:, :, None] == token_ids[:, None]) & (
        parents[:, :, None] == parents[:, None]
    )
    repeats &= (place[:, None] > place) & (place > 0)
    agrees &= ~repeats.any(dim=-1)
    is_kept = is_token & ~(visible & ~agrees[:, None]).any(dim=-1)
    # Path tokens have different depths; the others are sent behind the end.
    nodes = token_ids.new_zeros(len(token_ids), width + 1)
    target = depths.masked_fill(~is_kept, width)
    nodes = nodes.scatter(1, target, place.expand_as(target))[:, :width]
    counts = is_kept.sum(dim=1)
    return DeviceAcceptance(is_kept, nodes, counts, chosen.gather(1, nodes))
