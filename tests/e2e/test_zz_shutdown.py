"""Last in this folder: Ctrl-C leaves nothing behind."""

from __future__ import annotations

import pytest
from started_server import StartedServer, feature_segments

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("default")]


def test_shutdown_leaves_no_process_and_no_shared_memory(server: StartedServer) -> None:
    server.stop()
    assert server.survivors() == []
    assert feature_segments() <= server.segments_before
