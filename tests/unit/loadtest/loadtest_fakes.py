"""A scripted stand-in for the server, and the frames it streams."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any


def frame(payload: object) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(payload, ensure_ascii=False).encode() + b"\n\n"


@dataclass
class FakeServer:
    """Replies to every POST with ``reply`` and keeps what it was sent."""

    base_url: str = ""
    status: int = 200
    reply: list[bytes] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    """Sent with every reply."""
    text: str = ""
    """Answers a GET; else the model list does, or ``metrics``."""
    metrics: str = ""


def handler_for(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            models = json.dumps({"data": [{"id": "demo"}]})
            answer = server.metrics if self.path == "/metrics" else models
            self._send(200, [(server.text or answer).encode()])

        def do_POST(self) -> None:
            server.paths.append(self.path)
            raw = self.rfile.read(int(self.headers["content-length"]))
            server.bodies.append(json.loads(raw) if raw != b"{" else {})
            self._send(server.status, server.reply)

        def _send(self, status: int, pieces: list[bytes]) -> None:
            self.send_response(status)
            for name, value in server.headers.items():
                self.send_header(name, value)
            self.end_headers()
            for piece in pieces:
                self.wfile.write(piece)
                self.wfile.flush()

        def log_message(self, *_arguments: object) -> None:
            pass

    return Handler
