"""What an engine group tells the routers about itself, by way of Serve."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class GroupReport:
    """The routing statistics of one coordinator replica.

    Serve's controller fetches them every ``routing.report_period_s`` and sends them to every handle when
    they changed, so they are small.
    """

    num_outstanding_tokens: int = 0
    prefix_names: bytes = b""
    """See ``RecentNames``."""

    def to_stats(self) -> dict[str, Any]:
        """Return it as Serve's routing statistics."""
        return asdict(self)

    @classmethod
    def from_stats(cls, stats: dict[str, Any]) -> GroupReport:
        """Read it back. Silent replicas have nothing to do; fields of another version are left out."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in stats.items() if name in known})
