"""Choosing a drafter: by name, by thinking mode, and what is refused and counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from gateway_fakes import Encode, FakeEngine, Served, cycle, last
from prometheus_client.parser import text_string_to_metric_families

from dflash_wire.drafters import DrafterLimits
from gateway.app import create_app
from gateway.chat_tokenizer import ChatTokenizer
from gateway.metrics import GatewayMetrics
from gateway.state import GatewaySettings

pytestmark = pytest.mark.asyncio

DRAFTERS = tuple(DrafterLimits(*d) for d in (("default", 16), ("deep", 8), ("quick", 16)))


@pytest.fixture
def served(tokenizer: ChatTokenizer, settings: GatewaySettings, encode: Encode) -> Served:
    """Three drafters: thinking has one, its absence another."""
    settings = replace(
        settings, drafters=DRAFTERS, thinking_drafter="deep", non_thinking_drafter="quick"
    )
    engine, metrics = FakeEngine([cycle(encode("the")), last(encode(" end"))]), GatewayMetrics()
    return Served(create_app(engine, tokenizer, settings, metrics=metrics), engine, metrics)


@pytest.mark.parametrize(
    ("body", "drafter"),
    [
        ({}, None),
        ({"dflash": {"drafter": "quick"}}, "quick"),
        ({"dflash": {"drafter": "default"}}, "default"),
        ({"chat_template_kwargs": {}}, None),
        ({"chat_template_kwargs": {"enable_thinking": None}}, None),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "deep"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "quick"),
        # Who names one gets it.
        (
            {"chat_template_kwargs": {"enable_thinking": True}, "dflash": {"drafter": "default"}},
            "default",
        ),
    ],
)
async def test_chats_choose(served: Served, body: dict[str, Any], drafter: str | None) -> None:
    body = {**body, "dflash": {"stats": True, **body.get("dflash", {})}}
    answer = (await served.chat(**body)).json()
    assert served.engine.requests[0].drafter == drafter
    assert answer["dflash"]["drafter"] == (drafter or "default")


async def test_completions_choose_by_name_alone(served: Served) -> None:
    response = await served.complete(dflash={"drafter": "deep"})
    assert response.status_code == 200
    response = await served.complete(chat_template_kwargs={"enable_thinking": True})
    assert response.headers["x-dflash-ignored-fields"] == "chat_template_kwargs"
    assert [request.drafter for request in served.engine.requests] == ["deep", None]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"dflash": {"drafter": "slow"}}, "dflash.drafter"),
        ({"dflash": {"drafter": "deep", "policy": "static:16"}}, "dflash.policy"),
        (
            {
                "chat_template_kwargs": {"enable_thinking": True},
                "dflash": {"policy": "static:9"},
            },
            "dflash.policy",
        ),
        ({"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs.thinking"),
    ],
)
async def test_refusals(served: Served, fields: dict[str, Any], param: str) -> None:
    response = await served.chat(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert served.engine.requests == []


async def test_widths_up_to_the_drafters_own_are_fine(served: Served) -> None:
    for drafter, policy in (("deep", "static:8"), ("quick", "static:16")):
        response = await served.chat(dflash={"drafter": drafter, "policy": policy})
        assert response.status_code == 200


async def test_the_template_learns_about_thinking(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{{ enable_thinking is defined and enable_thinking }} {{ messages[0].content }}"
    monkeypatch.setattr(tokenizer._tokenizer, "chat_template", template)
    messages = [{"role": "user", "content": "hi"}]
    texts = [tokenizer.render(messages, thinking) for thinking in (None, False, True)]
    assert texts == ["False hi", "False hi", "True hi"]


async def test_cycles_are_counted_per_drafter(served: Served, encode: Encode) -> None:
    await served.chat(dflash={"drafter": "deep"})
    await served.chat(dflash={"drafter": "deep"})
    await served.chat()
    await served.chat(dflash={"drafter": "quick", "policy": "off"})
    counted = {
        (sample.name, sample.labels["drafter"]): sample.value
        for family in text_string_to_metric_families(served.metrics.render().decode())
        for sample in family.samples
        if "drafter" in sample.labels and "position" not in sample.labels
    }
    num_committed = len(encode("the")) + len(encode(" end"))
    for drafter, num_requests in (("deep", 2), ("default", 1), ("none", 1)):
        assert counted["dflash_cycles_total", drafter] == 2 * num_requests
        assert counted["dflash_committed_tokens_total", drafter] == num_committed * num_requests
    assert ("dflash_cycles_total", "quick") not in counted
