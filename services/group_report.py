"""What an engine group tells Serve about itself, and where a gateway process keeps the last reports."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from dflash_wire.records import EngineGroupLoad


@dataclass(frozen=True, slots=True)
class GroupReport:
    """The routing statistics of one coordinator replica.

    Serve's controller fetches them every ``routing.report_period_s`` and sends them to every handle when
    they changed, so they are small.
    """

    num_running: int = 0
    num_waiting: int = 0
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

    def load(self, group_id: str) -> EngineGroupLoad:
        """Return the gauges in it."""
        return EngineGroupLoad(
            group_id, self.num_running, self.num_waiting, self.num_outstanding_tokens
        )


_last: dict[tuple[str, str], list[EngineGroupLoad]] = {}


def publish_loads(app_name: str, deployment_name: str, loads: list[EngineGroupLoad]) -> None:
    """Replace what is known of a deployment's groups; called by this process's router."""
    _last[app_name, deployment_name] = loads


def last_loads(app_name: str, deployment_name: str) -> list[EngineGroupLoad]:
    """Return what the groups of a deployment said last, from any thread; empty before the first report."""
    return _last.get((app_name, deployment_name), [])
