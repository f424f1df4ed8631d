"""``engine.deterministic``: numbers are the same to the last bit, whatever the policy and the batch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest
from local_engines import Collector, build_engines, encoded_prompts, run

from dflash_ops.kernel_build import find_compiler
from dflash_wire.ports import EngineLimits
from dflash_wire.processors import TokenLogprobs
from dflash_wire.records import GenerationRequest
from dflash_wire.sampling import SamplingParams
from gateway.coordinator import Coordinator
from services.local import LocalRing

pytestmark = pytest.mark.unit

MAX_TOKENS = 30


class Kind(NamedTuple):
    """How attention is done."""

    is_deterministic: bool
    is_compiled: bool


compiled = pytest.mark.skipif(find_compiler() is None, reason="no C compiler here")
Told = tuple[list[int], list[TokenLogprobs], list[TokenLogprobs] | None]


@cache
def engines(kind: Kind) -> tuple[LocalRing, EngineLimits]:
    """Few positions per step: in company prompts are cut into other chunks than alone."""
    changed: dict[str, object] = {} if kind.is_compiled else {"kernel_folder": None}
    return build_engines(
        deterministic=kind.is_deterministic, max_step_positions=48, num_pages=512, **changed
    )


def request(
    request_id: str, prompt: list[int], policy: str, temperature: float
) -> GenerationRequest:
    return GenerationRequest(
        request_id,
        prompt,
        MAX_TOKENS,
        SamplingParams(temperature, seed=11),
        [],
        policy,
        num_logprobs=3,
        num_prompt_logprobs=1,
    )


def told(kind: Kind, mine: list[GenerationRequest], others: int) -> dict[str, Told]:
    """Run ``mine`` among ``others`` and return all that is said of their tokens."""
    ring, limits = engines(kind)
    sink = Collector()
    coordinator = Coordinator(ring, sink, limits, "static:8")
    prompts = encoded_prompts("mixed")
    policies = ("static:16", "static:4", "off", "static-tree:12")
    company = [
        replace(
            request(f"other-{i}", prompts[10 + i][:200], policies[i % 4], 0.9),
            num_logprobs=None,
            num_prompt_logprobs=None,
        )
        for i in range(others)
    ]
    # Mine come in between, one after another.
    row = [one for pair in zip(company, mine, strict=False) for one in pair] or mine
    run(coordinator, [*row, *company[len(mine) :]], per_step=1)
    result: dict[str, Told] = {}
    for one in mine:
        chunks = sink.chunks[one.request_id]
        logprobs = [entry for chunk in chunks for entry in chunk.logprobs or []]
        result[one.request_id] = (
            sink.tokens(one.request_id),
            logprobs,
            chunks[0].prompt_logprobs,
        )
    return result


def runs(kind: Kind, temperature: float) -> tuple[Told, list[Told]]:
    """Return what is told of a request alone under ``off``, and under other policies in company."""
    prompt = encoded_prompts("mixed")[3][:150]
    alone = told(kind, [request("a", prompt, "off", temperature)], 0)["a"]
    policies = ("off", "static:8", "static:16", "static-tree:24")
    mine = [request(f"m{i}", prompt, policy, temperature) for i, policy in enumerate(policies)]
    together = told(kind, mine, 5)
    return alone, [together[one.request_id] for one in mine]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    "kind", [Kind(True, True), Kind(True, False), pytest.param(Kind(False, True), marks=compiled)]
)
def test_alone_and_in_company_are_the_same_bits(kind: Kind, temperature: float) -> None:
    """The compiled kernel gives the same bits unasked."""
    alone, together = runs(kind, temperature)
    assert len(alone[0]) == len(alone[1]) == MAX_TOKENS
    assert alone[2] is not None and len(alone[2]) == 149
    for one in together:
        assert one == alone  # floats too, with no tolerance


def test_without_it_the_last_bits_differ() -> None:
    """Else the test above would pass whatever we do."""
    alone, together = runs(Kind(False, False), 0.0)
    assert [one[0] for one in together] == [alone[0]] * len(together)
    assert [one[1] for one in together] != [alone[1]] * len(together)
