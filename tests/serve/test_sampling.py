"""Processors, log-probabilities and rejection through the served ring: nothing is lost on the wire."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest
from served_app import ServedApp

from dflash_wire.processors import Processors, TokenLogprobs
from dflash_wire.records import GenerationRequest, TokenChunk
from dflash_wire.sampling import SamplingParams

pytestmark = [
    pytest.mark.serve,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
]

PROMPT = [1, 2954, 202, 49, 345, 982, 2150, 224, 22, 25, 558, 349, 86, 306]
ASKED = Processors(1.2, 0.4, 0.3, [40, 41], [2.0, -50.0], [[30], [31, 32]], [], 20, [2])


async def generate(served: ServedApp, request: GenerationRequest) -> list[TokenChunk]:
    async with served.engine() as engine:
        return [chunk async for chunk in engine.generate(request)]


def request(name: str, policy: str, **fields: object) -> GenerationRequest:
    made = GenerationRequest(
        name,
        PROMPT,
        40,
        SamplingParams(0.8, 0.95, seed=4, min_p=0.01),
        [2],
        policy,
        processors=ASKED,
        num_logprobs=2,
        num_prompt_logprobs=1,
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def told(chunks: list[TokenChunk]) -> list[TokenLogprobs]:
    return [entry for chunk in chunks for entry in chunk.logprobs or []]


@pytest.mark.asyncio
@pytest.mark.parametrize("policy", ["static:8", "static-tree:16"])
async def test_every_policy_equals_off(served: ServedApp, policy: str) -> None:
    plain = await generate(served, request("plain", "off"))
    got = await generate(served, request(policy, policy))
    assert [t for c in got for t in c.token_ids] == [t for c in plain for t in c.token_ids]
    assert got[-1].finish_reason == plain[-1].finish_reason
    for one, other in zip(told(got), told(plain), strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)
    assert len(told(got)) == sum(len(c.token_ids) for c in got) >= 20
    assert [len(c.prompt_logprobs or []) for c in got[:2]] == [len(PROMPT) - 1, 0]


@pytest.mark.asyncio
async def test_rejection_repeats_itself(served: ServedApp) -> None:
    sampling = SamplingParams(1.0, seed=9, rejects=True)
    answers = [
        await generate(
            served, request(f"again-{i}", "static:8", sampling=sampling, processors=None)
        )
        for i in range(2)
    ]
    tokens = [[t for c in chunks for t in c.token_ids] for chunks in answers]
    assert tokens[0] == tokens[1]
    assert any(c.cycle is not None and c.cycle.num_accepted_drafts for c in answers[0])


@pytest.mark.asyncio
async def test_over_http(served: ServedApp) -> None:
    """Fields of every kind in one request; the same text whatever the policy."""
    texts = []
    async with httpx.AsyncClient(base_url=served.base_url, timeout=120) as client:
        for policy in ("off", "static:8"):
            response = await client.post(
                "/v1/completions",
                json={
                    "model": served.args.model.id,
                    "prompt": "Sara has 12 pens. She buys",
                    "max_tokens": 24,
                    "seed": 3,
                    "frequency_penalty": 0.5,
                    "repetition_penalty": 1.1,
                    "logit_bias": {"30": -100},
                    "bad_words": ["pens"],
                    "min_tokens": 10,
                    "min_p": 0.02,
                    "logprobs": 2,
                    "echo": True,
                    "dflash": {"policy": policy},
                },
            )
            assert response.status_code == 200, response.text
            (choice,) = response.json()["choices"]
            texts.append(choice["text"])
            logprobs = choice["logprobs"]
            assert "Sara has 12 pens. She buys" in "".join(logprobs["tokens"])
            usage = response.json()["usage"]
            assert len(logprobs["tokens"]) == usage["total_tokens"]
    assert texts[0] == texts[1]
    assert texts[0].startswith("Sara has 12 pens. She buys")
