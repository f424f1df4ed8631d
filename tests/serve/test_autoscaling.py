"""The number of engine groups follows the outstanding tokens, and shrinking cuts no stream."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest
from served_app import SMALL, ServedApp, changed, collect, groups, running, until

from dflash_wire.records import GenerationRequest
from services.serve_engine import ServeEngine

pytestmark = [
    pytest.mark.serve,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),
]

APP = "dflash-autoscaled"
TARGET = 600
NUM_STREAMS = 8
LONG = 1500
"""Output tokens: 256 of them are expected at any time until the end is near."""


@pytest.fixture(scope="module")
def autoscaled(served: ServedApp, http_port: int) -> Iterator[ServedApp]:
    args = changed(
        served.args,
        verifier=SMALL,
        drafter=SMALL,
        routing={"report_period_s": 0.2},
        autoscaling={
            "max_engine_groups": 2,
            "target_outstanding_tokens": TARGET,
            "report_period_s": 0.5,
            "look_back_period_s": 1,
            "upscale_delay_s": 0,
            "downscale_delay_s": 0,
        },
    )
    yield from running(args, APP, http_port)


def long_request(name: str, rng: random.Random) -> GenerationRequest:
    prompt = [rng.randrange(100, 1000) for _ in range(40)]
    return GenerationRequest(name, prompt, LONG, policy="static:4")


def test_groups_come_with_load_and_go_without(served: ServedApp, autoscaled: ServedApp) -> None:
    rng = random.Random(0)
    kept_requests = [long_request(f"kept-{i}", rng) for i in range(2)]

    async def number_is(number: int) -> bool:
        return len(await groups(autoscaled)) == number

    async def scenario(engine: ServeEngine) -> list[list[int]]:
        assert await number_is(1)
        load: list[asyncio.Task[Any]] = [
            asyncio.create_task(collect(engine, long_request(f"load-{i}", rng)))
            for i in range(NUM_STREAMS)
        ]
        await until(lambda: number_is(2), "there are two groups")
        kept = [asyncio.create_task(collect(engine, request)) for request in kept_requests]

        async def both_work() -> bool:
            return all(group["num_running"] > 0 for group in await groups(autoscaled))

        await until(both_work, "the new group has work")
        for task in load:
            task.cancel()
        await asyncio.gather(*load, return_exceptions=True)
        # Two streams expect 512 tokens: one group is enough for them.
        await until(lambda: number_is(1), "one group is left")
        return [output.token_ids for output in await asyncio.gather(*kept)]

    async def run() -> list[list[int]]:
        async with autoscaled.engine() as engine:
            return await scenario(engine)

    expected = served.run(kept_requests, concurrency=2)
    assert asyncio.run(run()) == [output.token_ids for output in expected]
