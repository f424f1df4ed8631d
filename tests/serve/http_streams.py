"""Completions over HTTP, as the tests of several gateways need them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

Metrics = dict[tuple[str, ...], float]


@dataclass
class Stream:
    """What one streamed completion gave until it ended."""

    text: str = ""
    finish_reason: str | None = None
    failure: str = ""
    is_done: bool = False

    @property
    def is_whole(self) -> bool:
        return self.is_done and self.finish_reason is not None and not self.failure


def body(prompt: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    fixed = {"model": "dflash-demo", "temperature": 0, "seed": 1, "ignore_eos": True}
    return {**fixed, "prompt": prompt, "max_tokens": max_tokens, **more}


async def stream(
    client: httpx.AsyncClient, sent: dict[str, Any], on_text: Callable[[], None] = lambda: None
) -> Stream:
    """Read one stream to its end, good or bad; never raises for the bad ones."""
    got = Stream()
    try:
        async with client.stream("POST", "v1/completions", json={**sent, "stream": True}) as answer:
            if answer.status_code != 200:
                got.failure = f"{answer.status_code} {(await answer.aread())[:200]!r}"
                return got
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    _take(got, line.removeprefix("data: "))
                    on_text()
    except httpx.HTTPError as error:
        got.failure = repr(error)
    return got


def _take(got: Stream, data: str) -> None:
    if data == "[DONE]":
        got.is_done = True
        return
    event = json.loads(data)
    if "error" in event:
        got.failure = event["error"]["message"]
        return
    for choice in event["choices"]:
        got.text += choice["text"]
        got.finish_reason = choice["finish_reason"] or got.finish_reason


async def metrics(client: httpx.AsyncClient) -> Metrics:
    """One gateway's metrics; which gateway answers is chance."""
    text = (await client.get("metrics")).raise_for_status().text
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
