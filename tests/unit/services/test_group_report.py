"""Reports survive the way through Serve's controller, and versions that differ."""

from __future__ import annotations

import pytest

from services.group_report import GroupReport

pytestmark = pytest.mark.unit

REPORT = GroupReport(900, b"12345678")


def test_report_survives() -> None:
    assert GroupReport.from_stats(REPORT.to_stats()) == REPORT
    assert GroupReport.from_stats({**REPORT.to_stats(), "of_a_later_version": 1}) == REPORT
    assert GroupReport.from_stats({}) == GroupReport(0, b"")
