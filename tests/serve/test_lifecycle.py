"""Cancellation, lost actors, refused configurations, on the real application."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from typing import Any

import psutil
import pytest
import ray
from actor_processes import only_actor_process
from pydantic import ValidationError
from served_app import ServedApp, collect, until

from dflash_wire.codec import encode_request
from dflash_wire.errors import InvalidRequestError
from dflash_wire.records import GenerationRequest
from services.config import AppArgs
from services.frames import FrameReceiver

pytestmark = [pytest.mark.serve, pytest.mark.filterwarnings("default")]

PROMPT = list(range(100, 140))


def endless(request_id: str) -> GenerationRequest:
    """Nothing stops it but its length, which is far away."""
    return GenerationRequest(request_id, PROMPT, 1500, policy="static:4")


async def until_idle(app: ServedApp) -> None:
    """Return when nothing runs; every page must be free then."""
    now: dict[str, Any] = {}

    async def is_idle() -> bool:
        now.update(await app.coordinator.snapshot.remote())
        return bool(now["num_running"] == now["num_waiting"] == 0)

    await until(is_idle, "nothing runs")
    assert now["num_free_pages"] == now["num_pages"]


def test_closing_a_stream_frees_its_pages(served: ServedApp) -> None:
    async def start_and_leave() -> None:
        async with served.engine() as engine:
            stream = engine.generate(endless("leaver"))
            chunk = await anext(stream)
            assert chunk.token_ids
            assert (await served.coordinator.snapshot.remote())["num_free_pages"] < 2048
            await stream.aclose()
            await until_idle(served)

    asyncio.run(start_and_leave())


def test_many_streams_that_leave_at_random_points_leak_nothing(served: ServedApp) -> None:
    async def leave_after(num_chunks: int, engine: Any) -> None:
        stream = engine.generate(endless(f"leaver-{num_chunks}"))
        for _ in range(num_chunks):
            await anext(stream)
        await stream.aclose()

    async def all_of_them() -> None:
        async with served.engine() as engine:
            await asyncio.gather(*(leave_after(n, engine) for n in range(1, 24)))
            await until_idle(served)

    asyncio.run(all_of_them())


def test_requests_of_a_gateway_that_died_end(served: ServedApp) -> None:
    """Ray lets the calls of a dead process run on; nobody would read their tokens."""

    async def vanish() -> None:
        frames = FrameReceiver(served.args.link.kind)
        frames.start()
        calls = [
            served.coordinator.generate.remote(
                encode_request(replace(endless(f"orphan-{i}"), frame_address=frames.address))
            )
            for i in range(60)
        ]
        while (await served.coordinator.snapshot.remote())["num_running"] == 0:
            pass
        frames.close()  # as the end of a process does
        await asyncio.gather(*calls)
        await until_idle(served)

    asyncio.run(vanish())


def test_refusal_reaches_the_caller_with_its_class(served: ServedApp) -> None:
    async def ask() -> None:
        async with served.engine() as engine:
            await collect(engine, GenerationRequest("bad", PROMPT, 5, policy="static:99"))

    with pytest.raises(InvalidRequestError, match="static"):
        asyncio.run(ask())


def test_unknown_config_key_is_named() -> None:
    with pytest.raises(ValidationError, match="num_pagez"):
        AppArgs.model_validate({"engine": {"num_pagez": 5}})


@pytest.mark.parametrize("class_name", ["VerifierActor", "DrafterActor"])
def test_streams_go_on_when_an_actor_is_killed(served: ServedApp, class_name: str) -> None:
    """All executors are replaced and what runs prefills again: a pause, and the same tokens."""
    before = only_actor_process(class_name)
    whole = served.run([replace(endless("whole"), max_tokens=300)], concurrency=1)[0].token_ids

    async def stream(engine: Any, request_id: str) -> list[int]:
        token_ids: list[int] = []
        async for chunk in engine.generate(replace(endless(request_id), max_tokens=300)):
            if not token_ids and request_id == "first":
                os.kill(before.pid, signal.SIGKILL)
            token_ids += chunk.token_ids
        return token_ids

    async def streams() -> list[list[int]]:
        async with served.engine() as engine:
            names = ("first", "second", "third")
            return list(await asyncio.gather(*(stream(engine, name) for name in names)))

    assert asyncio.run(streams()) == [whole] * 3
    psutil.wait_procs([before], timeout=30)
    assert only_actor_process(class_name).pid != before.pid


def test_ray_is_local(served: ServedApp) -> None:
    """A guard: these tests kill processes, so they must never touch someone's cluster."""
    assert ray.is_initialized()
    assert len(ray.nodes()) == 1
