"""A closed loop of streams: each sends its next request when the last one has been answered."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import aiohttp

from loadtest.prompt_sets import Prompt
from loadtest.request_failures import failing_as
from loadtest.sse_client import ChatStream, ChatStreamReader, StreamError
from loadtest.timing import stream_timing


@dataclass(frozen=True)
class Answer:
    """One streamed answer; times in seconds on one clock."""

    start_s: float
    first_s: float
    """The first text came."""
    last_s: float
    num_tokens: int
    num_first: int
    """Tokens that had come with the first text."""
    num_cycles: int
    num_committed: int
    """Tokens committed by cycles, so not those that prefills sampled."""
    prompt_id: str = ""
    text: str = ""
    number: int = 0
    """Of its request: the same number means the same prompt, sampling and seed, whatever the policy."""

    @property
    def ttft_s(self) -> float:
        """Request sent to first text."""
        return self.first_s - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first chunk; None when there was only one."""
        num_later = self.num_tokens - self.num_first
        return (self.last_s - self.first_s) / num_later if num_later > 0 else None

    def tokens_between(self, begin_s: float, end_s: float) -> float:
        """Tokens that came in a window, the later ones spread evenly over their time."""
        tokens = float(self.num_first) if begin_s <= self.first_s < end_s else 0.0
        span = self.last_s - self.first_s
        overlap = min(end_s, self.last_s) - max(begin_s, self.first_s)
        if span > 0 and overlap > 0:
            tokens += (self.num_tokens - self.num_first) * overlap / span
        return tokens


def acceptance_length(answers: Sequence[Answer]) -> float | None:
    """Committed tokens per cycle of all answers, bonus included; None without cycles."""
    num_cycles = sum(answer.num_cycles for answer in answers)
    return sum(answer.num_committed for answer in answers) / num_cycles if num_cycles else None


@dataclass(frozen=True)
class Cell:
    """What a number of streams with one policy gave in one window."""

    policy: str
    num_streams: int
    begin_s: float
    end_s: float
    answers: tuple[Answer, ...]
    """All answers, also those that reach out of the window."""
    counted: Mapping[str, float] = field(default_factory=dict)
    """How much the server's counters rose, warm-up included; empty unless they were read."""

    @property
    def tokens_per_s(self) -> float:
        """Output tokens inside the window over its length."""
        tokens = sum(answer.tokens_between(self.begin_s, self.end_s) for answer in self.answers)
        return tokens / (self.end_s - self.begin_s)


GREEDY: Mapping[str, Any] = MappingProxyType({"temperature": 0})
"""Fields of a request that ask for the most likely token."""


def openai_body(
    model: str, prompt: Prompt, max_tokens: int, sampling: Mapping[str, Any] = GREEDY
) -> dict[str, Any]:
    """The request that every OpenAI-compatible server takes: streaming, with usage."""
    return {
        "model": model,
        "messages": prompt.messages,
        "max_tokens": max_tokens,
        **sampling,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def chat_body(
    model: str,
    policy: str,
    prompt: Prompt,
    max_tokens: int,
    salt: str,
    sampling: Mapping[str, Any] = GREEDY,
) -> dict[str, Any]:
    """The request to our server: also a policy and statistics; its salt keeps prefixes apart."""
    return {
        **openai_body(model, prompt, max_tokens, sampling),
        "cache_salt": salt,
        "dflash": {"policy": policy, "stats": True},
    }


def as_answer(
    stream: ChatStream, start_s: float, prompt_id: str = "", number: int = 0
) -> Answer | None:
    """Measure a complete stream; None when it had no text."""
    timing = stream_timing(stream, start_s)
    if timing is None:
        return None
    stats = stream.stats or {}
    return Answer(
        start_s=start_s,
        first_s=start_s + timing.ttft_s,
        last_s=start_s + timing.e2e_s,
        num_tokens=timing.completion_tokens,
        num_first=timing.tokens_in_first_chunk,
        num_cycles=int(stats.get("num_cycles", 0)),
        num_committed=sum(stats.get("committed_per_cycle", ())),
        prompt_id=prompt_id,
        text=stream.text,
        number=number,
    )


class ClosedLoop:
    """Runs cells against one server.

    Args:
        base_url: of the server.
        model: the name that requests carry.
        prompts: taken in turn by all streams; every cell begins anew.
        max_tokens: longest answer.
        is_ours: requests carry the fields that only our server knows; else the policy of a cell is
            just its name, and the server must not find prompts cached.
        keep_alive: streams reuse their connection. Some servers close it without saying so.
        sampling: fields of every request. Where they ask for chance, a request's number is its seed.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        prompts: Sequence[Prompt],
        max_tokens: int,
        *,
        is_ours: bool = True,
        keep_alive: bool = True,
        sampling: Mapping[str, Any] = GREEDY,
    ) -> None:
        self._url = f"{base_url}/v1/chat/completions"
        self._model = model
        self._prompts = list(prompts)
        self._numbers: Iterator[int] = iter(())
        self._max_tokens = max_tokens
        self._is_ours = is_ours
        self._keep_alive = keep_alive
        self._sampling = sampling
        # Not only within a loop: two of them, or two runs against one server, may send the same prompts.
        name = secrets.token_hex(4)
        self._salts = (f"closed-loop-{name}-{number}" for number in itertools.count())

    async def run(
        self, policy: str, num_streams: int, warm_s: float, measure_s: float, first_prompt: int = 0
    ) -> Cell:
        """Run one cell; it ends when the last answer that began inside it is complete.

        Args:
            policy: of its requests.
            num_streams: requests open at a time.
            warm_s: seconds before the window.
            measure_s: its length.
            first_prompt: number of the first request, counted as prompts in turn, so that cells to be
                compared get the same ones.

        Raises:
            BenchError: a request failed.
        """
        self._numbers = itertools.count(first_prompt)
        begin_s = time.perf_counter() + warm_s
        end_s = begin_s + measure_s
        connector = aiohttp.TCPConnector(limit=0, force_close=not self._keep_alive)
        timeout = aiohttp.ClientTimeout(total=None, sock_read=300)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            with failing_as(f"{policy}: a request failed"):
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(self._stream(session, policy, end_s))
                        for _ in range(num_streams)
                    ]
        answers = tuple(answer for task in tasks for answer in task.result())
        return Cell(policy, num_streams, begin_s, end_s, answers)

    async def _stream(
        self, session: aiohttp.ClientSession, policy: str, end_s: float
    ) -> list[Answer]:
        answers = []
        while time.perf_counter() < end_s:
            answer = await self._request(session, policy)
            if answer is not None:
                answers.append(answer)
        return answers

    async def _request(self, session: aiohttp.ClientSession, policy: str) -> Answer | None:
        number = next(self._numbers)
        prompt = self._prompts[number % len(self._prompts)]
        sampling = self._sampling
        if sampling["temperature"] > 0:
            sampling = {**sampling, "seed": number}
        common = (prompt, self._max_tokens)
        if self._is_ours:
            body = chat_body(self._model, policy, *common, next(self._salts), sampling)
        else:
            body = openai_body(self._model, *common, sampling)
        start_s, reader = time.perf_counter(), ChatStreamReader()
        async with session.post(self._url, json=body) as response:
            if response.status != 200:
                raise StreamError(f"status {response.status}: {(await response.text())[:500]}")
            async for piece in response.content.iter_any():
                stream = reader.feed(piece, time.perf_counter())
                if stream is not None:
                    return as_answer(stream, start_s, prompt.prompt_id, number)
        raise reader.ended_early()
