"""``/trace``: what happened when, in Chrome's format, and only where it is switched on."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest
from gateway_fakes import Encode, FakeEngine, Serve, last

from dflash_wire.records import StepRecord
from gateway.app import create_app_from
from gateway.chat_tokenizer import ChatTokenizer
from gateway.state import GatewaySettings, GatewayState
from gateway.trace import ChunkRecorder, chrome_trace

WITH_DRAFT = StepRecord(7, 2, 3, 12, 4, 9, 10.0, 10.001, 10.002, 1.5, 10.004, 3.0, 10.008, 10.009)
WITHOUT = WITH_DRAFT._replace(step_id=8, draft_began_s=0.0, draft_ms=0.0)


def slices(trace: dict[str, list[dict[str, object]]]) -> list[tuple[object, ...]]:
    return [
        (e["pid"], e["tid"], e["name"], e["ts"], e["dur"])
        for e in trace["traceEvents"]
        if e["ph"] == "X"
    ]


def test_a_step_is_a_slice_of_everyone_who_worked_on_it() -> None:
    assert slices(chrome_trace([[WITH_DRAFT]], [])) == [
        (1, 1, "plan", 10_000_000.0, 1000.0),
        (1, 2, "step 7", 10_002_000.0, 1500.0),
        (1, 3, "step 7", 10_004_000.0, 3000.0),
        (1, 1, "commit", 10_008_000.0, 1000.0),
    ]
    assert [s[1] for s in slices(chrome_trace([[WITHOUT]], []))] == [1, 3, 1]
    groups = chrome_trace([[WITHOUT], [WITH_DRAFT]], [])
    assert {s[0] for s in slices(groups)} == {1, 2}


@pytest.mark.asyncio
async def test_traces_are_off_unless_asked_for(serve: Serve) -> None:
    response = await serve([]).http.get("/trace")
    assert response.status_code == 404
    assert "gateway.trace" in response.json()["error"]["message"]


@pytest.mark.asyncio
async def test_trace_has_steps_and_chunks(
    tokenizer: ChatTokenizer, settings: GatewaySettings, encode: Encode
) -> None:
    engine = FakeEngine([encode("one two"), last(encode(" three"))])
    engine.steps = [[WITH_DRAFT]]
    state = GatewayState(engine, tokenizer, replace(settings), ChunkRecorder())
    transport = httpx.ASGITransport(app=create_app_from(lambda: state))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        body = {"model": settings.model_id, "prompt": "one", "stream": True}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        trace = (await client.get("/trace")).json()
    chunks = [e for e in trace["traceEvents"] if e["name"] == "chunk"]
    assert [c["args"]["tokens"] for c in chunks] == [len(encode("one two"))]
    assert any(e["name"] == "step 7" for e in trace["traceEvents"])
