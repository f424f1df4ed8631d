"""The clients of the soak: send what was drawn, leave when told to, and judge the answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from loadtest.soak_traffic import Draw, Traffic
from loadtest.sse_client import DONE, SSEParser, StreamError

MAX_KEPT_FAILURES = 20
BURST_SIZE = 72
BURST_EVERY_S = 15.0
BACK_OFF_S = 1.0
"""What a client waits after a 429."""

OK, REFUSED, LEFT, OVERLOADED, FAILED = "ok", "refused", "left", "overloaded", "failed"
OUTCOMES = (OK, REFUSED, LEFT, OVERLOADED, FAILED)


@dataclass
class Tally:
    """What came of all requests. Owner: the soak's event loop."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(kind of request, outcome)."""
    failures: list[str] = field(default_factory=list)
    """The first few, for people."""
    canaries: dict[str, str] = field(default_factory=dict)
    """The text that each canary got first."""
    num_canary_answers: int = 0
    num_canary_mismatches: int = 0

    def count(self, draw: Draw, outcome: str) -> None:
        """Add one outcome."""
        self.outcomes[draw.kind, outcome] += 1

    def fail(self, draw: Draw, why: str) -> str:
        """Add a failure; return that outcome."""
        self.count(draw, FAILED)
        if len(self.failures) < MAX_KEPT_FAILURES:
            self.failures.append(f"{draw.kind} {draw.path}: {why}"[:500])
        return FAILED

    def num(self, outcome: str) -> int:
        """Requests with this outcome."""
        return sum(n for (_, found), n in self.outcomes.items() if found == outcome)

    def check_canary(self, canary: str, text: str) -> None:
        """Compare a canary's text with the first one it got.

        Raises:
            StreamError: it differs.
        """
        self.num_canary_answers += 1
        first = self.canaries.setdefault(canary, text)
        if text != first:
            self.num_canary_mismatches += 1
            raise StreamError(f"canary {canary} got {text!r}, not {first!r} as before")


class Clients:
    """Closed-loop clients with pauses, and bursts on top.

    Owner: the soak's event loop.

    Args:
        base_url: of the server.
        traffic: what they send.
        tally: where outcomes go.
    """

    def __init__(self, base_url: str, traffic: Traffic, tally: Tally) -> None:
        self._base_url = base_url
        self._traffic = traffic
        self._tally = tally

    async def run(self, num_clients: int, seconds: float) -> None:
        """Run until ``seconds`` are over and the last answers have come."""
        end = time.monotonic() + seconds
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_read=300)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(num_clients):
                group.create_task(self._client(session, end))
            group.create_task(self._bursts(session, end))

    async def _client(self, session: aiohttp.ClientSession, end: float) -> None:
        while time.monotonic() < end:
            outcome = await self.send(session, self._traffic.draw())
            pause_s = BACK_OFF_S if outcome == OVERLOADED else self._traffic.pause_s()
            await asyncio.sleep(pause_s)

    async def _bursts(self, session: aiohttp.ClientSession, end: float) -> None:
        while time.monotonic() + BURST_EVERY_S < end:
            await asyncio.sleep(BURST_EVERY_S)
            await asyncio.gather(
                *(self.send(session, self._traffic.small()) for _ in range(BURST_SIZE))
            )

    async def send(self, session: aiohttp.ClientSession, draw: Draw) -> str:
        """Send one request, count and return what comes of it; never raises for the server's sake."""
        try:
            async with asyncio.timeout(draw.leave_after_s):
                outcome = await self._exchange(session, draw)
        except TimeoutError as error:
            if draw.leave_after_s is None:
                return self._tally.fail(draw, f"{type(error).__name__}: no answer in time")
            outcome = LEFT
        except (aiohttp.ClientError, StreamError, ValueError, KeyError) as error:
            return self._tally.fail(draw, f"{type(error).__name__}: {error}")
        self._tally.count(draw, outcome)
        return outcome

    async def _exchange(self, session: aiohttp.ClientSession, draw: Draw) -> str:
        """Return the outcome.

        Raises:
            StreamError: the answer is not what it has to be.
        """
        async with self._request(session, draw) as response:
            if response.status == 429:
                if "Retry-After" not in response.headers:
                    raise StreamError("429 without Retry-After")
                return OVERLOADED
            if response.status != draw.status:
                text = (await response.text())[:300]
                raise StreamError(f"status {response.status} instead of {draw.status}: {text}")
            if draw.status != 200:
                return REFUSED if draw.status == 405 else _check_error(await response.json())
            if draw.body is None:
                await response.read()
                return OK
            if not draw.is_stream:
                text = _whole_text(await response.json())
            else:
                streamed = await self._read_stream(response, draw.leave_after_events)
                if streamed is None:
                    return LEFT
                text = streamed
        if draw.canary is not None:
            self._tally.check_canary(draw.canary, text)
        return OK

    def _request(self, session: aiohttp.ClientSession, draw: Draw) -> Any:
        url = self._base_url + draw.path
        if draw.body is None:
            return session.get(url)
        if isinstance(draw.body, bytes):
            return session.post(url, data=draw.body, headers={"content-type": "application/json"})
        return session.post(url, json=draw.body)

    async def _read_stream(
        self, response: aiohttp.ClientResponse, leave_after: int | None
    ) -> str | None:
        """Return the text of a complete stream; None after leaving.

        Raises:
            StreamError: an error event, or no end.
        """
        parser, text, num_events, num_finished = SSEParser(), "", 0, 0
        if leave_after == 0:
            response.close()
            return None
        async for piece in response.content.iter_any():
            for event in parser.feed(piece):
                if event.data == DONE:
                    if not num_finished:
                        raise StreamError("no finish reason")
                    return text
                payload = json.loads(event.data)
                if event.name == "error" or payload.get("error"):
                    raise StreamError(f"error event: {event.data[:300]}")
                for choice in payload["choices"]:
                    text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                    num_finished += choice.get("finish_reason") is not None
                num_events += 1
                if num_events == leave_after:
                    response.close()  # the connection, not only this answer
                    return None
        raise StreamError(f"ended after {num_events} events without {DONE}")


def _whole_text(payload: dict[str, Any]) -> str:
    text = ""
    for choice in payload["choices"]:
        if choice["finish_reason"] not in ("stop", "length"):
            raise StreamError(f"finish reason {choice['finish_reason']!r}")
        text += choice["text"] if "text" in choice else choice["message"]["content"]
    return text


def _check_error(payload: dict[str, Any]) -> str:
    if not payload["error"]["message"]:
        raise StreamError("an error without a message")
    return REFUSED
