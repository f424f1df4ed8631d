from __future__ import annotations

import pytest
from gateway_fakes import Serve

from dflash_wire.errors import EngineUnavailableError
from gateway.app import create_app
from gateway.chat_tokenizer import ChatTokenizer
from gateway.state import GatewaySettings

pytestmark = pytest.mark.asyncio


async def test_health_never_asks_the_engine(serve: Serve) -> None:
    served = serve([])
    served.engine.not_ready = EngineUnavailableError("no")
    response = await served.http.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


async def test_ready(serve: Serve) -> None:
    served = serve([])
    response = await served.http.get("/ready")
    assert (response.status_code, response.json()) == (200, {"status": "ready"})
    served.engine.not_ready = EngineUnavailableError("The drafter is loading.")
    response = await served.http.get("/ready")
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "The drafter is loading."
    assert response.headers["retry-after"] == "1"


async def test_version(serve: Serve) -> None:
    assert (await serve([]).http.get("/version")).json() == {"version": "1.2.3"}


async def test_models(serve: Serve) -> None:
    served = serve([])
    models = [model async for model in served.openai.models.list()]
    assert [model.id for model in models] == ["demo/model"]
    model = await served.openai.models.retrieve("demo/model")
    assert (model.object, model.owned_by, model.created) == ("model", "dflash", 1700000000)
    # A slash in the id is part of it, also when the client does not escape it.
    raw = await served.http.get("/v1/models/demo/model")
    assert raw.json()["max_model_len"] == 128


async def test_openapi_describes_the_bodies(serve: Serve) -> None:
    document = (await serve([]).http.get("/openapi.json")).json()
    operation = document["paths"]["/v1/chat/completions"]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert schema["required"] == ["model", "messages"]
    assert "policy" in str(schema["properties"]["dflash"])
    assert "$ref" not in str(schema)


async def test_a_proxy_may_own_the_request_id(
    tokenizer: ChatTokenizer, settings: GatewaySettings, serve: Serve
) -> None:
    served = serve([])
    app = create_app(served.engine, tokenizer, settings, sends_request_id=False)
    served.http._transport.app = app
    assert "x-request-id" not in (await served.http.get("/health")).headers
