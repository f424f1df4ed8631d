"""``/openapi.json`` is true: whatever is sent, answers have documented statuses, types and schemas."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import schemathesis
from gateway_fakes import Item, Served, cycle
from openapi_fuzz import ADMIN_KEY, FuzzReport, fuzz, fuzz_config
from tool_models import HERMES, served_by, tool_tokenizer

from dflash_wire.gauges import GroupGauges
from dflash_wire.processors import TokenLogprobs
from dflash_wire.records import GenerationRequest
from gateway.state import GatewaySettings

MODEL = "demo/model"
NUM_EXAMPLES = int(os.environ.get("DFLASH_EXAMPLES", "5"))
"""Random requests per operation, beside those that try one boundary after another."""


def script(request: GenerationRequest) -> Iterator[Item]:
    """Answer anything: tokens that depend on the seed, and all that is asked about them."""
    num_tokens = min(request.max_tokens, 5)
    ids = [(request.sampling.seed + 7 * index) % 330 for index in range(num_tokens)]
    for start in range(0, num_tokens, 3):
        is_last = start + 3 >= num_tokens
        chunk = cycle(ids[start : start + 3], "length" if is_last else None)
        if request.num_logprobs is not None:
            chunk.logprobs = said(len(chunk.token_ids), request.num_logprobs)
        if start == 0 and request.num_prompt_logprobs is not None:
            num_told = len(request.prompt_token_ids) - 1
            chunk.prompt_logprobs = said(num_told, request.num_prompt_logprobs)
        yield chunk


def said(num_tokens: int, num_top: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(-1.0, list(range(num_top)), [-0.5] * num_top) for _ in range(num_tokens)]


async def check(grammar: str) -> str | None:
    """Find something wrong with some grammars: the gateway does not know which."""
    return "it is of odd length" if len(grammar) % 2 else None


@pytest.fixture
def served(settings: GatewaySettings) -> Served:
    open_settings = replace(settings, admin_key=ADMIN_KEY)
    made = served_by(tool_tokenizer(HERMES), open_settings, script, check)
    made.engine.groups = [GroupGauges("a", 1, 2, 3, 4, 5, 6, 7, 8, 9)]
    return made


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("default")
def test_answers_are_as_documented(served: Served) -> None:
    config = fuzz_config(NUM_EXAMPLES, seed=1)
    schema = schemathesis.openapi.from_asgi("/openapi.json", served.app, config=config)
    report = fuzz(schema, MODEL)
    print(report)
    assert report.errors == []
    assert report.failures == {}
    assert report.num_cases >= 2000
    check_reach(report, served)


def check_reach(report: FuzzReport, served: Served) -> None:
    """Every operation was answered well at least once, else its answers were never looked at."""
    operations = {
        f"{method.upper()} {path}"
        for path, methods in served.app.openapi()["paths"].items()
        for method in methods
    }
    well = {label.rpartition(" ")[0] for label in report.statuses if label.endswith(" 200")}
    assert operations - well == {"GET /trace"}  # it is off here
    assert len(served.engine.requests) > 200
    assert served.engine.num_open == 0
