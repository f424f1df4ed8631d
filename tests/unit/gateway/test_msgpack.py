"""msgpack says what JSON says: requests, answers, streams and errors."""

from __future__ import annotations

import json
from typing import Any

import msgpack
import pytest
from gateway_fakes import Encode, Serve, Served, cycle, last, sse_data
from hypothesis import given
from hypothesis import strategies as st

from dflash_wire.errors import EngineUnavailableError
from gateway.framing import SseFraming
from gateway.msgpack_framing import MsgpackFraming, accepts_msgpack

pytestmark = pytest.mark.asyncio

ACCEPT = {"Accept": "application/msgpack"}
CHAT = {"model": "demo/model", "messages": [{"role": "user", "content": "hi"}], "seed": 3}
COMPLETION = {"model": "demo/model", "prompt": [[5, 6], [7]], "seed": 3}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"n": 2, "dflash": {"stats": True}},
    {"return_token_ids": True},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
]


def frames(data: bytes) -> list[Any]:
    """Return the values of a stream of frames; all of it must be frames."""
    values = []
    while data:
        length = int.from_bytes(data[:4], "big")
        values.append(msgpack.unpackb(data[4 : 4 + length]))
        assert len(data) >= 4 + length
        data = data[4 + length :]
    return values


def same_but_for(value: Any) -> Any:
    """Leave out what differs between two answers to one request."""
    return {name: item for name, item in value.items() if name not in ("id", "created")}


@pytest.fixture
def served(serve: Serve, encode: Encode) -> Served:
    script = [encode("the "), cycle(encode("quick 😀" * 20)), last(encode(" fox"))]
    return serve(lambda _: script)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]
)
async def test_frames_are_the_events(
    path: str, body: dict[str, Any], options: dict[str, Any], served: Served
) -> None:
    body = {**body, **options, "stream": True}
    events = sse_data((await served.http.post(path, json=body)).text)
    response = await served.http.post(path, json=body, headers=ACCEPT)
    assert response.headers["content-type"] == "application/msgpack"
    head, *rest, end = frames(response.content)
    assert end is None and events.pop() == "[DONE]"
    chunks = [{**head, **one} for one in rest]
    assert [same_but_for(chunk) for chunk in chunks] == [same_but_for(one) for one in events]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not {"id", "object", "created", "model"} & set().union(*rest)
    assert len(response.content) < len(json.dumps(events))


async def test_a_whole_answer_is_one_object(served: Served) -> None:
    plain = (await served.http.post("/v1/chat/completions", json=CHAT)).json()
    response = await served.http.post("/v1/chat/completions", json=CHAT, headers=ACCEPT)
    assert response.headers["content-type"] == "application/msgpack"
    assert same_but_for(msgpack.unpackb(response.content)) == same_but_for(plain)


async def test_a_request_may_be_msgpack(served: Served) -> None:
    headers = {"Content-Type": "application/msgpack"}
    body = msgpack.packb({**COMPLETION, "temperature": 1, "wild": 1})
    response = await served.http.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-dflash-ignored-fields"] == "wild"
    assert [r.prompt_token_ids for r in served.engine.requests] == [[5, 6], [7]]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x81\xa1a",
        msgpack.packb(CHAT) + b"\x00",
        msgpack.packb({"model": b"\xff"}),
        msgpack.packb({1: 2}),
        msgpack.packb({**CHAT, "temperature": float("nan")}),
        msgpack.packb(msgpack.ExtType(5, b"x")),
        msgpack.packb(msgpack.Timestamp(1)),
        msgpack.packb([1]),
        b"\x91" * 3000 + b"\xc0",
        b"\xdf\xff\xff\xff\xff",
        b"\xa1\xff",
    ],
)
async def test_what_is_no_request_is_a_400(body: bytes, serve: Serve) -> None:
    served = serve([])
    headers = {"Content-Type": "application/x-msgpack"}
    response = await served.http.post("/v1/chat/completions", content=body, headers=headers)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] == "invalid_value"
    assert served.engine.requests == []


async def test_wrong_values_are_refused_alike(serve: Serve) -> None:
    served = serve([])
    for wrong in ({"temperature": "hot"}, {"max_tokens": True}, {"n": 0}, {"stop": [""]}):
        body = {**CHAT, **wrong}
        answers = [
            await served.http.post("/v1/chat/completions", json=body),
            await served.http.post(
                "/v1/chat/completions",
                content=msgpack.packb(body),
                headers={"Content-Type": "application/msgpack"},
            ),
        ]
        assert answers[0].status_code == answers[1].status_code == 400
        assert answers[0].json() == answers[1].json()


async def test_errors_are_msgpack_too(serve: Serve) -> None:
    served = serve([KeyError("x")])
    for path, status in (("/nowhere", 404), ("/v1/chat/completions", 500)):
        response = await served.http.post(path, json=CHAT, headers=ACCEPT)
        assert response.status_code == status
        assert set(msgpack.unpackb(response.content)["error"]) == {
            *("message", "type", "param", "code")
        }


async def test_an_error_inside_a_stream_is_the_last_frame(serve: Serve, encode: Encode) -> None:
    served = serve([encode("the"), EngineUnavailableError("gone")])
    body = {**CHAT, "stream": True}
    response = await served.http.post("/v1/chat/completions", json=body, headers=ACCEPT)
    *_, text, failure = frames(response.content)
    assert text["choices"][0]["delta"] == {"content": "the"}
    assert failure["error"]["code"] == "engine_unavailable"


@given(text=st.text(st.characters(codec="utf-8"), max_size=400))
async def test_templates_say_what_events_say(text: str) -> None:
    def chunk(content: str) -> dict[str, Any]:
        return {
            "id": "x",
            "choices": [{"index": 0, "delta": {"content": content}, "logprobs": None}],
        }

    for framing in (SseFraming(), MsgpackFraming()):
        template = framing.text_template(chunk("\0"))
        assert template.fill(text) == framing.event(chunk(text))


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (None, False),
        ("*/*", False),
        ("application/json", False),
        ("application/msgpack", True),
        ("text/html, Application/X-Msgpack;q=0.9", True),
        ("application/vnd.msgpack", True),
        ("application/msgpack;q=0", False),
        ("application/msgpack2", False),
        (";,,", False),
    ],
)
async def test_accept(accept: str | None, expected: bool) -> None:
    assert accepts_msgpack(accept) is expected
