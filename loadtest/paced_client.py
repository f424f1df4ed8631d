"""The client of ``make bench-gateway``: streams that read stamps, and single short requests."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from loadtest.cpu_time import cpu_s
from loadtest.processes import BenchError
from loadtest.request_failures import failing_as
from loadtest.sse_client import ChatStream, ChatStreamReader, StreamError
from loadtest.stamps import FIRST_TEXT, TOKENS_PER_STAMP, age_s

IDLE_S = 2.0
PROMPT = "Sara has 12 pens. She buys 3 boxes of 8 pens each. How many pens does Sara have?"


Parts = dict[str, tuple[int, ...]]
"""Part of an edge ("gateway", "proxy") -> its processes; all others that run are not its cost."""


@dataclass(frozen=True)
class Edge:
    """One way from the client to the blocks."""

    name: str
    base_url: str
    model: str
    find_parts: Callable[[], Parts]
    """Finds its processes; asked before every cell, because HAProxy replaces itself to reload."""


@dataclass(frozen=True)
class StreamCell:
    """Many streams through one edge for one window."""

    edge: str
    num_tokens: int
    measured_s: float
    cpu_s: dict[str, float]
    idle_cpu_s: dict[str, float]
    """CPU seconds per second without any stream, just before."""
    latencies_s: tuple[float, ...]
    """Frame sent to event received, of every block in the window."""


@dataclass(frozen=True)
class RequestCell:
    """Requests of one token through one edge, one after another."""

    edge: str
    cpu_s: dict[str, float]
    latencies_s: tuple[float, ...]
    """Request sent to answer complete."""


def _read_cpu_s(parts: Parts) -> dict[str, float]:
    return {part: sum(map(cpu_s, pids)) for part, pids in parts.items()}


def _used_since(before: dict[str, float], parts: Parts) -> dict[str, float]:
    return {part: seconds - before[part] for part, seconds in _read_cpu_s(parts).items()}


async def _idle(parts: Parts) -> dict[str, float]:
    before = _read_cpu_s(parts)
    await asyncio.sleep(IDLE_S)
    return {part: used / IDLE_S for part, used in _used_since(before, parts).items()}


def request_body(model: str, max_tokens: int) -> dict[str, Any]:
    """Return a plain streaming chat request, as most clients send it."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": max_tokens,
        "stream": True,
    }


def stamp_ages(stream: ChatStream, begin_s: float, end_s: float) -> list[float]:
    """Return how old each stamp was when it came, for those that came in the window.

    Raises:
        StreamError: a text is no stamp.
    """
    ages = []
    for chunk in stream.chunks:
        is_stamp = not chunk.is_final and chunk.text != FIRST_TEXT
        if not is_stamp or not begin_s <= chunk.arrival_s < end_s:
            continue
        try:
            ages.append(age_s(chunk.text, chunk.arrival_s))
        except ValueError as error:
            raise StreamError(f"an event's text is no stamp: {chunk.text!r}") from error
    return ages


class PacedClient:
    """Drives cells. Owner: one event loop; close it."""

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_read=60),
        )

    async def aclose(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def streams(
        self, edge: Edge, num_streams: int, step_s: float, warm_s: float, measure_s: float
    ) -> StreamCell:
        """Open all streams, wait until they run, and measure a window in which none begins or ends.

        Raises:
            BenchError: a request failed.
        """
        num_blocks = math.ceil((warm_s + measure_s) / step_s) + 2
        body = request_body(edge.model, 1 + TOKENS_PER_STAMP * num_blocks)
        parts = edge.find_parts()
        idle = await _idle(parts)
        begin_s = time.perf_counter() + warm_s
        end_s = begin_s + measure_s
        with failing_as(f"{edge.name}: a stream failed"):
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._read(edge, body)) for _ in range(num_streams)]
                await asyncio.sleep(begin_s - time.perf_counter())
                before = _read_cpu_s(parts)
                await asyncio.sleep(end_s - time.perf_counter())
                used = _used_since(before, parts)
        ages = [age for task in tasks for age in stamp_ages(task.result(), begin_s, end_s)]
        num_tokens = TOKENS_PER_STAMP * len(ages)
        return StreamCell(edge.name, num_tokens, measure_s, used, idle, tuple(ages))

    async def requests(self, edge: Edge, count: int) -> RequestCell:
        """Send requests of one token, each after the answer to the one before.

        Raises:
            BenchError: a request failed.
        """
        body = request_body(edge.model, 1)
        parts = edge.find_parts()
        latencies, before = [], _read_cpu_s(parts)
        try:
            for _ in range(count):
                began = time.perf_counter()
                stream = await self._read(edge, body)
                latencies.append(time.perf_counter() - began)
                if stream.text != FIRST_TEXT:
                    raise StreamError(f"the answer is {stream.text!r}, not {FIRST_TEXT!r}")
        except (aiohttp.ClientError, StreamError, TimeoutError) as error:
            raise BenchError(f"{edge.name}: a request failed: {error}") from error
        return RequestCell(edge.name, _used_since(before, parts), tuple(latencies))

    async def _read(self, edge: Edge, body: dict[str, Any]) -> ChatStream:
        pieces: list[tuple[float, bytes]] = []
        async with self._session.post(
            f"{edge.base_url}/v1/chat/completions", json=body
        ) as response:
            if response.status != 200:
                raise StreamError(f"status {response.status}: {(await response.text())[:500]}")
            async for piece in response.content.iter_any():
                pieces.append((time.perf_counter(), piece))
        return parse(pieces)


def parse(pieces: Sequence[tuple[float, bytes]]) -> ChatStream:
    """Read a stream's timed pieces once it has ended: parsing must not take the server's CPU.

    Raises:
        StreamError: see ``ChatStreamReader``.
    """
    reader = ChatStreamReader()
    for arrival_s, piece in pieces:
        stream = reader.feed(piece, arrival_s)
        if stream is not None:
            return stream
    raise reader.ended_early()
