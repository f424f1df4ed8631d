"""The least an ASGI app can do for ``make bench-gateway``: the same events at the same pace.

No framework, no tokens, no engine: one task ticks, every stream waits for its ticks and sends what is
ready-made but for the stamp. ``python -m loadtest.bare_app --port 8123``
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import uvicorn

from loadtest.stamps import FIRST_TEXT, TOKENS_PER_STAMP, stamp

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MODEL = "dflash-demo"


class BareApp:
    """Streams stamps. Owner: uvicorn's event loop.

    Args:
        step_s: seconds between the events of a stream; all streams tick at once.
    """

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._streams: set[asyncio.Queue[str]] = set()
        self._task: asyncio.Task[None] | None = None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one HTTP request: a stream for a POST, 200 for anything else."""
        if scope["method"] != "POST":
            body = json.dumps({"data": [{"id": MODEL}]}).encode()
            await _start(send, b"application/json")
            await send({"type": "http.response.body", "body": body})
            return
        body, has_more = b"", True
        while has_more:
            message = await receive()
            body += message.get("body", b"")
            has_more = message.get("more_body", False)
        await self._stream(send, json.loads(body)["max_tokens"])

    async def _stream(self, send: Send, max_tokens: int) -> None:
        await _start(send, b"text/event-stream; charset=utf-8")
        head, tail = _event({"content": "\0"}).split(b"\\u0000")
        opening = _event({"role": "assistant", "content": ""})
        await _body(send, opening + head + FIRST_TEXT.encode() + tail)
        num_tokens = 1
        ticks: asyncio.Queue[str] = asyncio.Queue()
        self._streams.add(ticks)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._tick())
        try:
            while num_tokens < max_tokens:
                num_tokens += TOKENS_PER_STAMP
                await _body(send, head + (await ticks.get()).encode() + tail)
        finally:
            self._streams.remove(ticks)
        await _body(send, _event({}, "length"))
        await _body(send, b"data: [DONE]\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _tick(self) -> None:
        next_s = time.perf_counter()
        while self._streams:
            next_s += self._step_s
            await asyncio.sleep(next_s - time.perf_counter())
            text = stamp(time.perf_counter())
            for ticks in self._streams:
                ticks.put_nowait(text)


def _event(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    chunk = {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": MODEL,
        "system_fingerprint": "dflash-0.1.0",
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}],
    }
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


async def _start(send: Send, content_type: bytes) -> None:
    headers = [(b"content-type", content_type)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _body(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bare_app", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-ms", type=float, default=64.0)
    options = parser.parse_args()
    app = BareApp(options.step_ms * 1e-3)
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.run(app, port=options.port, lifespan="off", access_log=False, log_level="warning")


if __name__ == "__main__":
    main()
