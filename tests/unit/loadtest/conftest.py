"""The scripted server on a free loopback port."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

# Importlib mode puts no test folder on the path; helpers live beside their tests.
sys.path.insert(0, str(Path(__file__).parent))

from loadtest_fakes import FakeServer, handler_for


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    server = FakeServer()
    with ThreadingHTTPServer(("127.0.0.1", 0), handler_for(server)) as http:
        server.base_url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        http.shutdown()
        thread.join()
