"""The demo target on two ranks under Ray: the answers of one rank, also when a rank is lost on the way."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import psutil
import pytest
from actor_processes import only_actor_process
from served_app import SMALL, Output, ServedApp, changed, collect, running

from dflash_wire.processors import Processors
from dflash_wire.records import GenerationRequest, SamplingParams
from services.config import AppArgs

pytestmark = [
    pytest.mark.serve,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),
]

PROMPT = list(range(100, 140))
POLICIES = ("off", "static:8", "static-tree:16", "adaptive")


@pytest.fixture(scope="module")
def split(http_port: int, app_args: AppArgs) -> Iterator[ServedApp]:
    args = changed(app_args, verifier={**SMALL, "tensor_parallel": 2}, drafter=SMALL)
    yield from running(args, "split", http_port)


def requests(prefix: str) -> list[GenerationRequest]:
    """Several temperatures, processors and policies; prompts that begin alike."""
    penalties = Processors(repetition_penalty=1.2, presence_penalty=0.3)
    return [
        GenerationRequest(
            f"{prefix}-{i}",
            PROMPT[: 20 + 2 * (i % 5)],
            24,
            SamplingParams(temperature=(0.0, 0.8)[i % 2], top_p=0.95, seed=i),
            policy=POLICIES[i % len(POLICIES)],
            processors=penalties if i % 3 == 0 else None,
        )
        for i in range(16)
    ]


def tokens_of(outputs: list[Output]) -> list[tuple[list[int], str]]:
    return [(output.token_ids, output.finish_reason) for output in outputs]


def test_two_ranks_answer_as_one(served: ServedApp, split: ServedApp) -> None:
    whole = served.run(requests("whole"), concurrency=1)
    assert tokens_of(split.run(requests("split"), concurrency=8)) == tokens_of(whole)


def test_a_stream_goes_on_when_a_rank_is_lost(served: ServedApp, split: ServedApp) -> None:
    """The whole verifier is replaced; the client sees a pause and the same tokens."""
    sampling = SamplingParams(temperature=0.8, seed=7)
    request = GenerationRequest("stream", PROMPT, 400, sampling, policy="static:4")
    (whole,) = served.run([request], concurrency=1)
    before = only_actor_process("RankActor")

    async def stream_past_the_loss() -> list[int]:
        token_ids: list[int] = []
        async with split.engine() as engine:
            async for chunk in engine.generate(request):
                if not token_ids:
                    os.kill(before.pid, signal.SIGKILL)
                token_ids += chunk.token_ids
        return token_ids

    assert asyncio.run(stream_past_the_loss()) == whole.token_ids
    psutil.wait_procs([before], timeout=30)
    assert only_actor_process("RankActor").pid != before.pid

    async def ask_again() -> list[int]:
        async with split.engine() as engine:
            return (await collect(engine, request)).token_ids

    assert asyncio.run(ask_again()) == whole.token_ids
