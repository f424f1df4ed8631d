"""What a trace says of who worked when, and what a traced server is told."""

from __future__ import annotations

import pytest

from loadtest.trace import busy_shares, overlap, parse_arguments, traced_config


def test_overlap_of_two_rows_of_spans() -> None:
    assert overlap([(0, 4), (6, 8)], [(1, 2), (3, 7)]) == 1 + 1 + 1
    assert overlap([], [(0, 1)]) == 0
    assert overlap([(0, 1)], [(1, 2)]) == 0


def slice_of(thread: int, began: float, ended: float) -> dict[str, object]:
    return {"ph": "X", "pid": 1, "tid": thread, "name": "s", "ts": began, "dur": ended - began}


def test_shares() -> None:
    names = ((1, "coordinator"), (2, "drafter"), (3, "verifier"))
    events = [
        {"ph": "M", "pid": 1, "tid": t, "name": "thread_name", "args": {"name": name}}
        for t, name in names
    ]
    events += [slice_of(1, 0, 1), slice_of(2, 1, 4), slice_of(3, 2, 9), slice_of(1, 9, 10)]
    events.append({**slice_of(2, 0, 10), "pid": 2})  # another group
    assert busy_shares({"traceEvents": events}) == {"drafter": 0.3, "verifier": 0.7, "both": 0.2}


def test_config_keeps_what_it_does_not_change() -> None:
    config = {
        "http_options": {"port": 8000},
        "applications": [{"name": "dflash", "args": {"engine": {"policy": "off"}}}],
    }
    changed = traced_config(config, 2)
    assert changed["http_options"] == {"port": 8000}
    assert changed["applications"] == [
        {
            "name": "dflash",
            "args": {"engine": {"policy": "off", "cohorts": 2}, "gateway": {"trace": True}},
        }
    ]
    assert config["applications"][0]["args"] == {"engine": {"policy": "off"}}


@pytest.mark.parametrize("cohorts", ["3", "one", "1,2,3"])
def test_only_one_and_two_cohorts(cohorts: str) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--cohorts", cohorts])
