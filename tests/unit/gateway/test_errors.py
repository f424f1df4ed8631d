from __future__ import annotations

import json
from collections.abc import AsyncIterator

import httpx
import openai
import pytest
from gateway_fakes import AsgiCall, Encode, Serve, last, sse_data

from dflash_wire import errors
from dflash_wire.errors import DFlashError, error_to_wire
from dflash_wire.records import TokenChunk
from gateway.app import create_app_from
from gateway.chat_tokenizer import ChatTokenizer
from gateway.errors import (
    MethodNotAllowedError,
    ModelNotFoundError,
    UnsupportedMediaTypeError,
    UnsupportedParameterError,
)
from gateway.state import GatewayState

pytestmark = pytest.mark.asyncio

TREE_MODULES = ("dflash_wire.errors", "gateway.errors")
ENGINE_ERRORS = [
    (errors.InvalidRequestError, 400, "invalid_request_error", "invalid_value"),
    (errors.ContextLengthError, 400, "invalid_request_error", "context_length_exceeded"),
    (errors.NotFoundError, 404, "not_found_error", "not_found"),
    (errors.PayloadTooLargeError, 413, "invalid_request_error", "payload_too_large"),
    (errors.OverloadedError, 429, "rate_limit_error", "overloaded"),
    (errors.EngineUnavailableError, 503, "server_error", "engine_unavailable"),
    (errors.ExecutorLostError, 503, "server_error", "executor_lost"),
    (errors.ExecutorsReplacedError, 503, "server_error", "executors_replaced"),
    (errors.RequestCancelledError, 503, "server_error", "engine_unavailable"),
    (errors.RetryableError, 503, "server_error", "unavailable"),
    (errors.AuthenticationError, 401, "authentication_error", "invalid_api_key"),
    (errors.ClientError, 400, "invalid_request_error", "invalid_request"),
    (errors.FatalError, 500, "server_error", "engine_failed"),
    (errors.ConfigError, 500, "server_error", "bad_config"),
    (DFlashError, 500, "server_error", "internal_error"),
    (UnsupportedParameterError, 400, "invalid_request_error", "unsupported_parameter"),
    (ModelNotFoundError, 404, "not_found_error", "model_not_found"),
    (MethodNotAllowedError, 405, "invalid_request_error", "method_not_allowed"),
    (UnsupportedMediaTypeError, 415, "invalid_request_error", "unsupported_media_type"),
]


def check_error(response: httpx.Response, status: int, code: str, param: str | None = None) -> str:
    """Assert OpenAI's nested shape and return the message."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["code"], body["error"]["param"]) == (code, param)
    assert response.headers["x-request-id"]
    return body["error"]["message"]


async def test_the_table_has_every_class() -> None:
    def tree(cls: type[DFlashError]) -> set[type[DFlashError]]:
        return {cls}.union(*(tree(child) for child in cls.__subclasses__()))

    ours = {cls for cls in tree(DFlashError) if cls.__module__ in TREE_MODULES}
    assert ours == {row[0] for row in ENGINE_ERRORS}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("cls", "status", "error_type", "code"), ENGINE_ERRORS)
async def test_engine_refusal_is_an_http_error(
    cls: type[DFlashError],
    status: int,
    error_type: str,
    code: str,
    stream: bool | None,
    serve: Serve,
) -> None:
    response = await serve([cls("no", None)]).chat(stream=stream)
    message = check_error(response, status, code)
    assert response.json()["error"]["type"] == error_type
    assert message == "no" or cls is errors.RequestCancelledError
    assert ("retry-after" in response.headers) == (status in (429, 503))


@pytest.mark.parametrize("stream", [False, True])
async def test_error_chunk_before_any_text(serve: Serve, stream: bool | None) -> None:
    wire = error_to_wire(errors.OverloadedError("queue is full"))
    response = await serve([TokenChunk("", [], error=wire)]).chat(stream=stream)
    assert check_error(response, 429, "overloaded") == "queue is full"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.EngineUnavailableError("gone"), "engine_unavailable"),
        (KeyError("x"), "internal_error"),
    ],
)
async def test_error_after_the_first_byte(
    serve: Serve, encode: Encode, error: Exception, code: str
) -> None:
    served = serve([encode("the"), error])
    response = await served.chat(stream=True)
    assert response.status_code == 200
    *_, text, failure = sse_data(response.text)
    assert text["choices"][0]["delta"] == {"content": "the"}
    assert failure["error"]["code"] == code
    assert set(failure["error"]) == {"message", "type", "param", "code"}
    assert "[DONE]" not in response.text


async def test_error_chunk_delivers_its_tokens_first(serve: Serve, encode: Encode) -> None:
    wire = error_to_wire(errors.FatalError("verifier lost"))
    response = await serve([TokenChunk("", encode("the"), error=wire)]).chat(stream=True)
    *_, text, failure = sse_data(response.text)
    assert text["choices"][0]["delta"] == {"content": "the"}
    assert failure["error"] == {
        "message": "verifier lost",
        "type": "server_error",
        "param": None,
        "code": "engine_failed",
    }


async def test_the_openai_client_raises_on_an_error_event(serve: Serve, encode: Encode) -> None:
    served = serve([encode("the"), errors.EngineUnavailableError("gone")])
    stream = await served.openai.chat.completions.create(
        model="demo/model", messages=[{"role": "user", "content": "hi"}], stream=True
    )
    with pytest.raises(openai.APIError, match="gone"):
        async for _ in stream:
            pass


async def test_the_openai_client_maps_statuses(serve: Serve) -> None:
    served = serve([errors.OverloadedError("full")])
    with pytest.raises(openai.RateLimitError, match="full"):
        await served.openai.chat.completions.create(
            model="demo/model", messages=[{"role": "user", "content": "hi"}]
        )
    with pytest.raises(openai.NotFoundError) as caught:
        await served.openai.models.retrieve("other")
    assert caught.value.code == "model_not_found"


async def test_an_engine_that_ends_early_is_an_error(serve: Serve, encode: Encode) -> None:
    check_error(await serve([encode("the")]).chat(), 503, "engine_unavailable")
    response = await serve([encode("the")]).chat(stream=True)
    assert sse_data(response.text)[-1]["error"]["code"] == "engine_unavailable"


async def test_a_bug_hides_its_details(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    response = await serve([KeyError("secret")]).chat()
    message = check_error(response, 500, "internal_error")
    assert "secret" not in response.text
    assert response.headers["x-request-id"] in message
    assert "secret" in caplog.text


async def test_route_level_errors(serve: Serve) -> None:
    http = serve([]).http
    check_error(await http.get("/nowhere"), 404, "not_found")
    check_error(await http.post("/v1/chat/completions/", json={}), 404, "not_found")
    response = await http.get("/v1/chat/completions")
    check_error(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "POST"
    check_error(await http.post("/health"), 405, "method_not_allowed")


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
async def test_wrong_content_type(serve: Serve, kind: str | None) -> None:
    headers = {"Content-Type": kind} if kind else {}
    response = await serve([]).http.post("/v1/completions", content=b"{}", headers=headers)
    check_error(response, 415, "unsupported_media_type")


async def test_json_with_charset_is_json(serve: Serve) -> None:
    body = json.dumps({"model": "demo/model", "prompt": "hi"}).encode()
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    served = serve([last([])])
    response = await served.http.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"nonsense", b'{"model": "\xff"}', b"[" * 3000, b'{"temperature": NaN}']
)
async def test_malformed_json(serve: Serve, raw: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    response = await serve([]).http.post("/v1/completions", content=raw, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_value"


@pytest.mark.parametrize("raw", [b"[]", b"null", b'"text"', b"3"])
async def test_a_body_that_is_no_object(serve: Serve, raw: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    response = await serve([]).http.post("/v1/completions", content=raw, headers=headers)
    assert "JSON object" in check_error(response, 400, "invalid_value")


async def test_body_too_large_declared_and_chunked(serve: Serve) -> None:
    served = serve([])
    check_error(await served.complete(prompt="x" * 5000), 413, "payload_too_large")

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 100

    headers = {"Content-Type": "application/json"}
    response = await served.http.post("/v1/completions", content=pieces(), headers=headers)
    check_error(response, 413, "payload_too_large")


async def test_a_starting_server(tokenizer: ChatTokenizer) -> None:
    def provider() -> GatewayState:
        raise errors.EngineUnavailableError("The server is starting.")

    transport = httpx.ASGITransport(app=create_app_from(provider))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/metrics")).status_code == 200
        for path in ("/ready", "/v1/models", "/version"):
            check_error(await http.get(path), 503, "engine_unavailable")
        response = await http.post("/v1/completions", json={})
        check_error(response, 503, "engine_unavailable")


async def test_a_failed_head_is_not_answered_twice(serve: Serve, encode: Encode) -> None:
    served = serve([encode("the")])
    body = {"model": "demo/model", "prompt": "hi", "stream": True}
    call = AsgiCall(served.app, "/v1/completions", body)
    await call.task
    starts = 0
    while not call.writes.empty():
        starts += call.writes.get_nowait()["type"] == "http.response.start"
    assert starts == 1
