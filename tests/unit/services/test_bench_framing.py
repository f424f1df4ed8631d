"""The framing benchmark reads back what it writes, in both framings."""

from __future__ import annotations

import json
import sys

import pytest

from services import bench_framing

pytestmark = pytest.mark.unit


def test_both_framings_are_read_back_and_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "--events", "7", "--tokens-per-event", "3", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", arguments)
    bench_framing.main()
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    sse, packed = report["rows"]
    assert (sse["framing"], packed["framing"]) == ("sse", "msgpack")
    assert packed["bytes_per_token"] < sse["bytes_per_token"]
