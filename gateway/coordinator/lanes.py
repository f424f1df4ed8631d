"""Which of several coordinators that share a drafter gets the next request."""

from __future__ import annotations

from collections.abc import Sequence

MAX_EXTRA_LOAD = 4
"""Live requests that a lane may have more than the least loaded one and still get its prefixes' requests."""


def choose_lane(num_live: Sequence[int], num_cached: Sequence[int]) -> int:
    """Return the lane for a request: where most of its prefix is cached, unless that lane is too busy.

    Args:
        num_live: live requests of every lane.
        num_cached: cached pages of the request's beginning in every lane.

    Returns:
        the lane with the longest cached prefix among those within ``MAX_EXTRA_LOAD`` of the least
        loaded; between equals the less loaded one, then the first.
    """
    limit = min(num_live) + MAX_EXTRA_LOAD
    open_lanes = [lane for lane, load in enumerate(num_live) if load <= limit]
    return min(open_lanes, key=lambda lane: (-num_cached[lane], num_live[lane], lane))
