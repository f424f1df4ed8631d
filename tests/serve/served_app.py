"""The running application as the tests of this folder see it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle

from dflash_wire.records import GenerationRequest, GenerationStats
from services.app import build
from services.config import AppArgs
from services.route_hints import RouteHints
from services.serve_engine import ServeEngine

ROOT = Path(__file__).resolve().parents[2]
APP = "dflash-test"
DEADLINE_S = 300
SMALL = {"num_cpus": 0.1, "num_threads": 1}
"""An executor section for applications of several groups."""


@dataclass(frozen=True)
class Output:
    """What one request gave."""

    token_ids: list[int]
    finish_reason: str
    stats: GenerationStats


@dataclass(frozen=True)
class ServedApp:
    """The running application as a test sees it."""

    args: AppArgs
    base_url: str
    name: str = APP

    @property
    def coordinator(self) -> DeploymentHandle:
        return serve.get_deployment_handle("Coordinator", self.name)

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[ServeEngine]:
        """A gateway's end; when the context ends, the requests it has left end as orphans."""
        hints = RouteHints(self.args.engine.page_size, self.args.routing.expected_output_tokens)
        engine = ServeEngine(self.coordinator, self.args.link.kind, hints)
        try:
            yield engine
        finally:
            engine.close()

    def run(self, requests: list[GenerationRequest], concurrency: int) -> list[Output]:
        """Answer all requests, ``concurrency`` at a time, in order."""
        return asyncio.run(self._run(requests, concurrency))

    async def _run(self, requests: list[GenerationRequest], concurrency: int) -> list[Output]:
        gate = asyncio.Semaphore(concurrency)

        async def one(request: GenerationRequest) -> Output:
            async with gate:
                return await collect(engine, request)

        async with self.engine() as engine:
            return list(await asyncio.gather(*(one(request) for request in requests)))


def running(args: AppArgs, name: str, port: int) -> Iterator[ServedApp]:
    """An application beside the others of this Ray, for as long as a fixture lasts."""
    serve.run(build(args), name=name, route_prefix=f"/{name}")
    yield ServedApp(args, f"http://127.0.0.1:{port}/{name}", name)
    serve.delete(name)


def changed(args: AppArgs, **sections: Any) -> AppArgs:
    """The arguments with some keys of some sections changed."""
    fields = args.model_dump(exclude_unset=True)
    for name, value in sections.items():
        is_section = isinstance(value, dict)
        fields[name] = {**fields.get(name, {}), **value} if is_section else value
    return AppArgs.model_validate(fields)


async def collect(engine: ServeEngine, request: GenerationRequest) -> Output:
    token_ids: list[int] = []
    stats = GenerationStats()
    async for chunk in engine.generate(request):
        token_ids += chunk.token_ids
        stats.num_cached_tokens += chunk.num_cached_tokens or 0
        if chunk.cycle is not None:
            stats.add(chunk.cycle)
        if chunk.finish_reason is not None:
            return Output(token_ids, chunk.finish_reason, stats)
    raise AssertionError("the stream ended without a finish reason")


def snapshot(app: ServedApp) -> dict[str, Any]:
    return dict(app.coordinator.snapshot.remote().result(timeout_s=30))


async def groups(app: ServedApp) -> list[dict[str, Any]]:
    """A snapshot of every engine group; none while a lost one is still asked."""
    try:
        return list(await app.coordinator.broadcast("snapshot").results_async(timeout_s=30))
    except RayActorError:
        return []


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Ask again and again; every condition here is a round trip or more."""
    deadline = time.monotonic() + DEADLINE_S
    while not await condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
