"""The engine groups' load on the gateway's ``/metrics``: every gateway shows every group."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from dflash_wire.errors import EngineUnavailableError
from dflash_wire.records import EngineGroupLoad
from gateway.state import StateProvider

_GAUGES = (
    ("requests_running", "Sequences that hold pages.", "num_running"),
    ("requests_waiting", "Sequences that wait for pages.", "num_waiting"),
    (
        "outstanding_tokens",
        "Tokens to prefill and expected output of both.",
        "num_outstanding_tokens",
    ),
)


class EngineGroupCollector(Collector):
    """Reads the groups' last reports when somebody asks, so they cost nothing otherwise.

    Sum over ``engine_group`` for the deployment. A report is about a second old. A group that has ended is no
    longer in the answer.
    """

    def __init__(self, provider: StateProvider) -> None:
        self._provider = provider

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield one family per gauge, with one sample per group."""
        loads = self._loads()
        for name, text, field in _GAUGES:
            family = GaugeMetricFamily(f"dflash_engine_group_{name}", text, labels=["engine_group"])
            for load in loads:
                family.add_metric([load.group_id], getattr(load, field))
            yield family

    def _loads(self) -> list[EngineGroupLoad]:
        try:
            return self._provider().engine.group_loads()
        except EngineUnavailableError:  # still starting
            return []
