"""What the gateway makes of a coordinator's chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from dflash_wire.errors import EngineUnavailableError
from dflash_wire.records import GenerationRequest, TokenChunk
from gateway.routing.prefix_names import prefix_names
from services.route_hints import RouteHints
from services.serve_engine import _complete

pytestmark = pytest.mark.unit


def read(*chunks: TokenChunk) -> list[list[int]]:
    async def source() -> AsyncIterator[TokenChunk]:
        for chunk in chunks:
            yield chunk

    async def scenario() -> list[list[int]]:
        return [chunk.token_ids async for chunk in _complete(source())]

    return asyncio.run(scenario())


def test_chunks_that_follow_each_other_pass() -> None:
    chunks = (TokenChunk("r", [1]), TokenChunk("r", [2, 3], num_before=1))
    assert read(*chunks, TokenChunk("r", [4], "stop", num_before=3)) == [[1], [2, 3], [4]]


@pytest.mark.parametrize("num_before", [0, 2, 4])
def test_a_hole_is_an_error(num_before: int) -> None:
    with pytest.raises(EngineUnavailableError, match="tokens were lost"):
        read(TokenChunk("r", [1]), TokenChunk("r", [2, 3], "stop", num_before=num_before))


def test_hints_tell_the_work_and_the_prefix() -> None:
    hints = RouteHints(page_size=16, expected_output_tokens=50)
    request = GenerationRequest("r", list(range(100)), max_tokens=20, cache_salt="tenant")
    assert hints.of(request) == {"work": 120, "prefix": prefix_names(range(100), "tenant", 16)}
    assert hints.of(replace(request, max_tokens=2000))["work"] == 150
