"""Last in this folder: Ctrl-C leaves nothing behind."""

from __future__ import annotations

import re

import pytest
from started_server import StartedServer, feature_segments

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("default")]


SERVES_OWN = re.compile(
    r"Task exception was never retrieved.{0,1500}?RequestCancelledError: Request \S+ was cancelled",
    re.S,
)
"""Serve's Python proxy forgets, now and then, a task of a client that has left."""


def test_nothing_that_clients_did_is_a_traceback_in_the_log(server: StartedServer) -> None:
    log = SERVES_OWN.sub("", server.log_path.read_text())
    assert server.startup_log in log
    assert "Traceback" not in log and "Request failed" not in log


def test_shutdown_leaves_no_process_and_no_shared_memory(server: StartedServer) -> None:
    server.stop()
    assert server.survivors() == []
    assert feature_segments() <= server.segments_before
