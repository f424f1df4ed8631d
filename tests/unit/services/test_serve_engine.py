"""What the gateway makes of a coordinator's chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from dflash_wire.errors import EngineUnavailableError
from dflash_wire.records import TokenChunk
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
