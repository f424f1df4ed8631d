"""What the soak sends is refused, or answered, as it expects: a list of wrong requests goes stale."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest
from gateway_fakes import FakeEngine, last

from gateway.app import create_app
from gateway.chat_tokenizer import ChatTokenizer
from gateway.state import GatewaySettings
from loadtest import prompt_sets
from loadtest.soak_traffic import CHAT, WRONG, Draw, Traffic

pytestmark = pytest.mark.asyncio


@pytest.fixture
def http(tokenizer: ChatTokenizer, settings: GatewaySettings) -> httpx.AsyncClient:
    """A gateway with the limits of the demo pair, over an engine that says one token."""
    limits = {
        "max_context": 2048,
        "vocab_size": 4096,
        "max_body_bytes": 1 << 20,
        "max_choices_per_request": 16,
    }
    app = create_app(FakeEngine([last([5])]), tokenizer, replace(settings, **limits))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test")


def draws() -> list[Draw]:
    source = Traffic("demo/model", prompt_sets.load("chat"), 0)
    return [source.draw() for _ in range(600)]


async def send(http: httpx.AsyncClient, draw: Draw) -> httpx.Response:
    if draw.body is None:
        return await http.get(draw.path)
    content = {"content": draw.body} if isinstance(draw.body, bytes) else {"json": draw.body}
    return await http.post(draw.path, headers={"content-type": "application/json"}, **content)


async def test_every_wrong_request_is_refused_as_expected(http: httpx.AsyncClient) -> None:
    wrong = [draw for draw in draws() if draw.kind == "wrong"]
    found = {
        (str(draw.body)[-60:], (await send(http, draw)).status_code, draw.status) for draw in wrong
    }
    assert len(wrong) > len(WRONG)
    assert {one for one in found if one[1] != one[2]} == set()


async def test_every_other_request_is_answered(
    http: httpx.AsyncClient, tokenizer: ChatTokenizer
) -> None:
    for draw in draws():
        if not isinstance(draw.body, dict) or draw.kind == "wrong":
            continue
        # The fake engine tells none, and the tiny tokenizer takes a token for every byte.
        body = {k: v for k, v in draw.body.items() if k not in ("logprobs", "top_logprobs")}
        if draw.path == CHAT:
            body["messages"] = [m | {"content": m["content"][:200]} for m in body["messages"]]
        response = await http.post(draw.path, json=body)
        assert response.status_code == 200, (draw, response.text)
