"""A scripted stand-in for the server, on a free loopback port."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


@dataclass
class FakeServer:
    """Replies to every POST with ``reply`` and keeps what it was sent."""

    base_url: str = ""
    status: int = 200
    reply: list[bytes] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)


def handler_for(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, [json.dumps({"data": [{"id": "demo"}]}).encode()])

        def do_POST(self) -> None:
            server.paths.append(self.path)
            server.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self._send(server.status, server.reply)

        def _send(self, status: int, pieces: list[bytes]) -> None:
            self.send_response(status)
            self.end_headers()
            for piece in pieces:
                self.wfile.write(piece)
                self.wfile.flush()

        def log_message(self, *_arguments: object) -> None:
            pass

    return Handler


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
