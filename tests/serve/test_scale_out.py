"""Several gateways and several engine groups: requests spread, texts are equal, losses stay small."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from actor_processes import actor_processes
from http_streams import Metrics, Stream, body, metrics, stream
from served_app import DEADLINE_S, SMALL, ServedApp, changed, groups, running, until

pytestmark = [
    pytest.mark.serve,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),
]

APP = "dflash-scale"
NUM_STREAMS = 8
NUM_STRANGERS = 24
"""Some six of them are asked through one gateway and again through the other."""


def random_prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(100, 1000) for _ in range(num_tokens)]


@pytest.fixture(scope="module")
def scaled(served: ServedApp, http_port: int) -> Iterator[ServedApp]:
    args = changed(
        served.args,
        num_engine_groups=2,
        gateway={"num_replicas": 2},
        verifier=SMALL,
        drafter=SMALL,
        routing={"report_period_s": 0.2},
    )
    yield from running(args, APP, http_port)


def client_of(app: ServedApp) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=100)
    return httpx.AsyncClient(base_url=f"{app.base_url}/", timeout=DEADLINE_S, limits=limits)


async def until_idle(app: ServedApp) -> None:
    async def is_idle() -> bool:
        now = await groups(app)
        return len(now) == 2 and all(g["num_free_pages"] == g["num_pages"] for g in now)

    await until(is_idle, "both groups have all their pages")


async def until_both_work(app: ServedApp) -> None:
    async def both_work() -> bool:
        now = await groups(app)
        return len(now) == 2 and all(g["num_running"] > 0 for g in now)

    await until(both_work, "both groups run something")


async def run_streams(app: ServedApp, bodies: list[dict[str, Any]]) -> list[Stream]:
    async with client_of(app) as client:
        return list(await asyncio.gather(*(stream(client, sent) for sent in bodies)))


def bodies_of(seed: int, max_tokens: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [body(random_prompt(rng, 20 + 10 * i), max_tokens) for i in range(NUM_STREAMS)]


def test_requests_spread_and_texts_are_those_of_one_group(
    served: ServedApp, scaled: ServedApp
) -> None:
    bodies = bodies_of(1, 60)

    async def both() -> None:
        expected = await run_streams(served, bodies)
        assert all(s.is_whole for s in expected), expected
        bursts: list[str] = []

        async def have_both_worked() -> bool:
            # A group that has just started may answer a router's first questions too late. Each burst
            # has a salt of its own, for what a group knows goes back to it.
            bursts.append(f"burst {len(bursts)}")
            salted = [{**sent, "cache_salt": bursts[-1]} for sent in bodies]
            assert await run_streams(scaled, salted) == expected
            num_steps = [g["num_steps"] for g in await groups(scaled)]
            return len(num_steps) == 2 and all(num_steps)

        await until(have_both_worked, "both groups have worked")
        num_prompt_tokens = sum(len(sent["prompt"]) for sent in bodies)
        await both_gateways_answered(scaled, len(bursts) * num_prompt_tokens)

    asyncio.run(both())


async def both_gateways_answered(app: ServedApp, num_prompt_tokens: int) -> None:
    async with client_of(app) as client:
        seen: set[float] = set()

        async def are_two() -> bool:
            seen.add((await metrics(client))["dflash_prompt_tokens_total",])
            return 0 not in seen and len(seen) == 2 and sum(seen) == num_prompt_tokens

        await until(are_two, "two gateways have answered")


def test_prompts_of_one_http_request_spread(served: ServedApp, scaled: ServedApp) -> None:
    """All its calls carry one id in Serve; each must get a group nevertheless."""
    rng = random.Random(2)
    sent = body([], 8) | {"prompt": [random_prompt(rng, 40) for _ in range(24)]}

    async def both() -> list[list[str]]:
        texts = []
        for app in (served, scaled):
            async with client_of(app) as client:
                answer = (await client.post("v1/completions", json=sent)).raise_for_status().json()
                texts.append([choice["text"] for choice in answer["choices"]])
        return texts

    alone, spread = asyncio.run(both())
    assert len(alone) == 24
    assert spread == alone


async def ask(client: httpx.AsyncClient, prompt: list[int], salt: str = "") -> int:
    """Return how many of the prompt's tokens were cached."""
    sent = body(prompt, 8, **({"cache_salt": salt} if salt else {}))
    answer = (await client.post("v1/completions", json=sent)).raise_for_status().json()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_follow_ups_find_their_prefix_through_any_gateway(scaled: ServedApp) -> None:
    rng = random.Random(3)
    conversations = [random_prompt(rng, 600) for _ in range(6)]

    async def talk() -> None:
        async with client_of(scaled) as client:
            prefilled = [g["num_steps"] for g in await groups(scaled)]
            assert [await ask(client, prompt) for prompt in conversations] == [0] * 6
            for before, after in zip(
                prefilled, [g["num_steps"] for g in await groups(scaled)], strict=True
            ):
                assert after > before  # six strangers went to both groups
            await until_gateways_hear_of_all(client, rng)
            for _turn in range(3):
                for prompt in conversations:
                    prompt += random_prompt(rng, 30)
                    assert await ask(client, prompt) >= 592
            assert await ask(client, conversations[0], salt="another tenant") == 0

    asyncio.run(talk())


async def until_gateways_hear_of_all(client: httpx.AsyncClient, rng: random.Random) -> None:
    """A report holds all that its group was asked before. So once follow-ups of later strangers find their
    prefix whichever gateway they come through, the gateways know of everything earlier too."""

    async def are_informed() -> bool:
        # Fresh ones every time: a follow-up that went astray has its prefix in both groups.
        strangers = [random_prompt(rng, 100) for _ in range(NUM_STRANGERS)]
        assert [await ask(client, prompt) for prompt in strangers] == [0] * NUM_STRANGERS
        return all([await ask(client, prompt) == 96 for prompt in strangers])

    await until(are_informed, "follow-ups of strangers find their prefix")


def outstanding(now: Metrics) -> list[float]:
    return [v for k, v in now.items() if k[0] == "dflash_outstanding_tokens"]


def test_metrics_show_the_work_of_every_group(scaled: ServedApp) -> None:
    async def watch() -> None:
        async with client_of(scaled) as client:

            async def is_idle() -> bool:
                return outstanding(await metrics(client)) == [0, 0]

            async def is_busy() -> bool:
                # Each stream expects 256 more tokens. Gateways know each other's load, and that the
                # last test's is gone, only from reports, so one group may get more than its half.
                now = outstanding(await metrics(client))
                return len(now) == 2 and min(now) > 0 and sum(now) == 256 * NUM_STREAMS

            await until(is_idle, "no group has anything to do")
            streams = [
                asyncio.create_task(stream(client, body(list(range(100 + i, 140)), 1500)))
                for i in range(NUM_STREAMS)
            ]
            await until(is_busy, "both groups show their load")
            for running in streams:
                running.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
            await until_idle(scaled)

    asyncio.run(watch())


def kill_one(class_name: str) -> None:
    victims = actor_processes(f"ServeReplica:{APP}:{class_name}")
    assert len(victims) == 2
    os.kill(victims[0].pid, signal.SIGKILL)


async def lose_one_of(
    app: ServedApp, class_name: str, bodies: list[dict[str, Any]]
) -> list[Stream]:
    """Run streams, kill one replica when all have begun; return what the streams gave."""
    begun: set[int] = set()
    async with client_of(app) as client:
        running = [
            asyncio.create_task(stream(client, sent, lambda i=i: begun.add(i)))
            for i, sent in enumerate(bodies)
        ]

        async def have_begun() -> bool:
            await asyncio.sleep(0)
            return len(begun) == len(bodies)

        await until_both_work(app)
        await until(have_begun, "all streams have begun")
        kill_one(class_name)
        return list(await asyncio.gather(*running))


@pytest.mark.parametrize("class_name", ["Gateway", "Coordinator"])
def test_a_lost_replica_ends_its_own_requests_only(
    served: ServedApp, scaled: ServedApp, class_name: str
) -> None:
    bodies = bodies_of(5, 300)

    async def scenario() -> None:
        expected = await run_streams(served, bodies)
        assert all(s.is_whole for s in expected), expected
        got = await lose_one_of(scaled, class_name, bodies)
        ended = [s for s in got if not s.is_whole]
        assert 0 < len(ended) < NUM_STREAMS, got
        for mine, theirs in zip(got, expected, strict=True):
            if mine.is_whole:
                assert mine == theirs
            else:
                assert theirs.text.startswith(mine.text), (mine, theirs)
        assert all(not s.is_done for s in ended)
        # At once, with one replica left, and again when the other is back.
        first = (await run_streams(scaled, bodies[:1]))[0]
        assert first == expected[0]
        await until_idle(scaled)
        assert (await run_streams(scaled, bodies[:4])) == expected[:4]

    asyncio.run(scenario())
