"""How many engine groups the load needs: the policy that Serve's controller runs.

Serve pickles this module by value into its controller, so it imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

OUTSTANDING_TOKENS = "outstanding_tokens"
"""The metric that coordinators record and the policy reads."""


def groups_needed(
    outstanding_tokens: Iterable[float], num_groups: int, target_outstanding_tokens: float
) -> float:
    """Return how many groups would have ``target_outstanding_tokens`` each.

    Not rounded and not bounded: Serve rounds up, keeps to the limits and waits for the configured delays. A
    group that has not reported yet counts as idle: its share of the load is still with the others.

    Args:
        outstanding_tokens: one number for each group that reported.
        num_groups: groups that run.
        target_outstanding_tokens: what one group should have in front of it.
    """
    reports = list(outstanding_tokens)
    if not reports:
        return num_groups  # nothing is known: stay
    return sum(reports) / target_outstanding_tokens


class OutstandingTokensPolicy:
    """``groups_needed`` as Serve calls it. Immutable.

    Args:
        target_outstanding_tokens: what one group should have in front of it.
    """

    def __init__(self, target_outstanding_tokens: float) -> None:
        self._target = target_outstanding_tokens

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Return the wanted number of replicas and no state; ``context`` is an ``AutoscalingContext``."""
        reports = (context.aggregated_metrics or {}).get(OUTSTANDING_TOKENS, {})
        # Serve keeps a replica's last metrics while it stops; they are no load any more.
        values = [reports[r] for r in context.running_replicas if r in reports]
        return groups_needed(values, context.target_num_replicas, self._target), {}
