"""Admin routes: closed without a key, closed to other keys, and what they do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest
from gateway_fakes import FakeEngine

from dflash_wire.errors import EngineUnavailableError, InvalidRequestError
from gateway.app import create_app
from gateway.chat_tokenizer import ChatTokenizer
from gateway.state import GatewaySettings

pytestmark = pytest.mark.asyncio

KEY = "correct horse battery"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine([])


@pytest.fixture
def http(
    engine: FakeEngine, tokenizer: ChatTokenizer, settings: GatewaySettings
) -> httpx.AsyncClient:
    app = create_app(engine, tokenizer, replace(settings, admin_key=KEY))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test")


async def test_without_a_key_there_are_no_admin_routes(
    engine: FakeEngine, tokenizer: ChatTokenizer, settings: GatewaySettings
) -> None:
    app = create_app(engine, tokenizer, settings)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        for header in ({}, {"Authorization": "Bearer "}, {"Authorization": "Bearer None"}):
            response = await http.post("/admin/policy", json={"policy": "off"}, headers=header)
            assert response.status_code == 404
            assert "gateway.admin_key" in response.json()["error"]["message"]
    assert engine.policies == []


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", f"Bearer {KEY}x", f"bearer {KEY}", "Bearer \u00e9"]
)
async def test_other_keys_are_refused(
    http: httpx.AsyncClient, engine: FakeEngine, header: str | None
) -> None:
    headers = {} if header is None else {"Authorization": header.encode()}
    for method, path in (("POST", "/admin/policy"), ("GET", "/debug/block_scheduler")):
        response = await http.request(method, path, json={"policy": "off"}, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["type"] == "authentication_error"
        assert KEY not in response.text
    assert engine.policies == []


async def test_the_policy_changes(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await http.post("/admin/policy", json={"policy": "off"}, headers=AUTHORIZED)
    assert (response.status_code, response.json()) == (200, {"policy": "off", "engine_groups": 2})
    assert engine.policies == ["off"]


@pytest.mark.parametrize("body", [{}, {"policy": 3}, {"policy": "off", "more": 1}, []])
async def test_a_wrong_body_is_refused(
    http: httpx.AsyncClient, engine: FakeEngine, body: object
) -> None:
    response = await http.post("/admin/policy", json=body, headers=AUTHORIZED)
    assert response.status_code == 400
    assert engine.policies == []


@pytest.mark.parametrize(
    ("refusal", "status"),
    [(InvalidRequestError("no", "policy"), 400), (EngineUnavailableError("gone"), 503)],
)
async def test_a_refusal_of_the_engine_reaches_the_operator(
    http: httpx.AsyncClient, engine: FakeEngine, refusal: Exception, status: int
) -> None:
    engine.refusal = refusal
    response = await http.post("/admin/policy", json={"policy": "odd"}, headers=AUTHORIZED)
    assert response.status_code == status


async def test_decisions_are_explained(http: httpx.AsyncClient) -> None:
    response = await http.get("/debug/block_scheduler?last=2", headers=AUTHORIZED)
    assert response.json() == {"a/0": ["598 speculate: why", "599 speculate: why"]}
    default = await http.get("/debug/block_scheduler", headers=AUTHORIZED)
    assert len(default.json()["a/0"]) == 20
    for last in ("0", "513", "x"):
        response = await http.get(f"/debug/block_scheduler?last={last}", headers=AUTHORIZED)
        assert response.status_code == 400


async def test_nothing_is_read_of_those_without_the_key(
    http: httpx.AsyncClient, settings: GatewaySettings
) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1 << 16
            yield b" " * (1 << 16)

    json_type = {"Content-Type": "application/json"}
    response = await http.post("/admin/policy", content=endless(), headers=json_type)
    assert (response.status_code, sent) == (401, 0)
    response = await http.post(
        "/admin/policy", content=endless(), headers={**json_type, **AUTHORIZED}
    )
    assert response.status_code == 413
    assert sent <= settings.max_body_bytes + (1 << 17)
