"""Reports survive the way through Serve's controller, and versions that differ."""

from __future__ import annotations

import pytest

from dflash_wire.records import EngineGroupLoad
from services.group_report import GroupReport, last_loads, publish_loads

pytestmark = pytest.mark.unit

REPORT = GroupReport(3, 1, 900, b"12345678")


def test_report_survives() -> None:
    assert GroupReport.from_stats(REPORT.to_stats()) == REPORT
    assert GroupReport.from_stats({**REPORT.to_stats(), "of_a_later_version": 1}) == REPORT
    assert GroupReport.from_stats({}) == GroupReport(0, 0, 0, b"")


def test_loads_are_kept_by_deployment() -> None:
    loads = [REPORT.load("group")]
    publish_loads("app", "Coordinator", loads)
    assert last_loads("app", "Coordinator") == [EngineGroupLoad("group", 3, 1, 900)]
    assert last_loads("other", "Coordinator") == []
