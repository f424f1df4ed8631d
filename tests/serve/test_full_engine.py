"""An engine with as many requests as it takes is full, not unready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from served_app import ServedApp

from dflash_wire.records import GenerationRequest, TokenChunk
from services.serve_engine import ServeEngine

pytestmark = [pytest.mark.serve, pytest.mark.filterwarnings("default")]

PROMPT = list(range(100, 140))
PAUSE_S = 0.1
"""Between two looks: asking all the time would leave Serve no time to route the requests."""


async def num_taken(engine: ServeEngine) -> int:
    return sum(group.num_running + group.num_waiting for group in await engine.gauges())


def test_readiness_and_gauges_pass_the_queue(served: ServedApp) -> None:
    engine_args = served.args.engine
    num_ongoing = engine_args.max_rows + engine_args.max_waiting

    async def scenario() -> Any:
        engine = served.engine()
        streams: list[AsyncGenerator[TokenChunk, None]] = []
        firsts: list[asyncio.Future[TokenChunk]] = []
        # In parts: what waits in front of the replica at the same time is bounded as well. The last ones
        # stay there.
        for upto in (150, 300, num_ongoing + 20):
            for i in range(len(streams), upto):
                request = GenerationRequest(f"r{i}", PROMPT, 1500, policy="off")
                streams.append(engine.generate(request))
                firsts.append(asyncio.ensure_future(anext(streams[-1])))
            while await num_taken(engine) < min(upto, num_ongoing):
                await asyncio.sleep(PAUSE_S)
        await engine.check_ready()
        (group,) = await engine.gauges()
        for first in firsts:
            first.cancel()
        await asyncio.gather(*firsts, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
        while await num_taken(engine):
            await asyncio.sleep(PAUSE_S)
        return group, (await engine.gauges())[0]

    full, idle = asyncio.run(scenario())
    assert full.num_running == engine_args.max_rows
    assert full.num_waiting == engine_args.max_waiting
    assert 0 < full.num_held_pages <= full.num_pages == engine_args.num_pages
    assert idle.num_held_pages == 0
    assert idle.group == full.group
