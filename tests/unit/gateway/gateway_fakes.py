"""A scripted engine and hand-driven ASGI calls for the gateway's tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from typing import Any

import httpx
import openai
from fastapi import FastAPI

from dflash_wire.errors import DFlashError
from dflash_wire.gauges import GroupGauges
from dflash_wire.records import CycleStats, GenerationRequest, StepRecord, TokenChunk
from gateway.metrics import GatewayMetrics

Item = list[int] | TokenChunk | Exception | asyncio.Event
Encode = Callable[[str], list[int]]
Serve = Callable[..., "Served"]
Script = Callable[[GenerationRequest], Iterable[Item]]

NUM_DRAFT_TOKENS = 31


def cycle(token_ids: list[int], reason: str | None = None) -> TokenChunk:
    """Return a cycle's chunk: all tokens but the bonus were drafted. Without tokens, no cycle."""
    num_tokens = len(token_ids)
    stats = CycleStats(NUM_DRAFT_TOKENS, num_tokens - 1, num_tokens, 10.0, 20.0, 0.5)
    return TokenChunk("", token_ids, reason, stats if token_ids else None)


def last(token_ids: list[int], reason: str = "stop") -> TokenChunk:
    """Return a cycle's chunk that ends the sequence."""
    return cycle(token_ids, reason)


class FakeEngine:
    """Plays ``script``: id lists and chunks are yielded, errors raised, events waited for."""

    def __init__(self, script: Script | list[Item]) -> None:
        self.script = script if callable(script) else lambda _: script
        self.requests: list[GenerationRequest] = []
        self.num_open = 0
        self.num_yielded = 0
        self.opened = asyncio.Event()
        self.not_ready: DFlashError | None = None
        self.groups: list[GroupGauges] = []
        self.steps: list[list[StepRecord]] = []
        self.policies: list[str] = []
        self.refusal: DFlashError | None = None

    def generate(self, request: GenerationRequest) -> FakeChunks:
        self.requests.append(request)
        return FakeChunks(self, request)

    async def check_ready(self) -> None:
        if self.not_ready is not None:
            raise self.not_ready

    async def recorded_steps(self) -> list[list[StepRecord]]:
        return self.steps

    async def decisions(self, most: int) -> dict[str, list[str]]:
        return {"a/0": [f"{i} speculate: why" for i in range(600)][-most:]}

    async def set_policy(self, policy: str) -> int:
        if self.refusal is not None:
            raise self.refusal
        self.policies.append(policy)
        return 2

    async def gauges(self) -> list[GroupGauges]:
        return self.groups


class FakeChunks:
    """An engine's iterator. No generator: only ``aclose`` closes it, garbage collection does not."""

    def __init__(self, engine: FakeEngine, request: GenerationRequest) -> None:
        self._engine = engine
        self._request_id = request.request_id
        self._items = iter(engine.script(request))
        self._is_open = True
        engine.num_open += 1
        engine.opened.set()

    def __aiter__(self) -> FakeChunks:
        return self

    async def __anext__(self) -> TokenChunk:
        for item in self._items:
            await asyncio.sleep(0)
            if isinstance(item, Exception):
                raise item
            if isinstance(item, asyncio.Event):
                await item.wait()
                continue
            self._engine.num_yielded += 1
            return item if isinstance(item, TokenChunk) else TokenChunk(self._request_id, item)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._engine.num_open -= self._is_open
        self._is_open = False


class Served:
    """An app over a scripted engine, with the clients to talk to it."""

    def __init__(self, app: FastAPI, engine: FakeEngine, metrics: GatewayMetrics) -> None:
        self.app = app
        self.engine = engine
        self.metrics = metrics
        transport = httpx.ASGITransport(app=app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test")
        self.openai = openai.AsyncOpenAI(
            api_key="unused", base_url="http://test/v1", http_client=self.http, max_retries=0
        )

    async def chat(self, **fields: object) -> httpx.Response:
        """Post a chat request; ``fields`` override a valid body, ``...`` removes a field."""
        body = {"model": "demo/model", "messages": [{"role": "user", "content": "hi"}], **fields}
        body = {name: value for name, value in body.items() if value is not ...}
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, **fields: object) -> httpx.Response:
        """Post a completion request, like ``chat``."""
        body = {"model": "demo/model", "prompt": "hi", **fields}
        body = {name: value for name, value in body.items() if value is not ...}
        return await self.http.post("/v1/completions", json=body)


class AsgiCall:
    """One POST that the test drives itself: it sees each write and may hang up."""

    def __init__(self, app: FastAPI, path: str, body: dict[str, Any]) -> None:
        self.writes: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        raw = json.dumps(body).encode()
        self._inbox.put_nowait({"type": "http.request", "body": raw, "more_body": False})
        headers = [(b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "server": ("test", 80),
            "client": ("test", 1),
        }
        self.task = asyncio.create_task(app(scope, self._inbox.get, self._send))
        self.is_closed = False

    async def _send(self, message: dict[str, Any]) -> None:
        if self.is_closed:
            raise OSError("connection lost")
        self.writes.put_nowait(message)

    def hang_up(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})


def sse_data(text: str) -> list[Any]:
    """Return the payloads of an event stream, ``[DONE]`` as a string."""
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [item if item == "[DONE]" else json.loads(item) for item in events]
