"""What ``/openapi.json`` says of each route: bodies, answers, streams, msgpack beside JSON, and errors.

Routes read bodies and write answers by hand, so the framework knows nothing of them: this says it.
"""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.responses import Response

from gateway.msgpack_framing import MSGPACK
from gateway.response_schemas import COMPONENTS, Schema, an_object, constant, ref

JSON_TYPE = "application/json"
EVENTS = "text/event-stream"
OF_BODIES = (400, 413, 415)
"""Errors of any route that reads a body."""
NAMES_MODEL = 404
OF_ENGINE = (429, 503)
_TEXT: Schema = {"type": "string"}
_HEADERS = {"X-Request-Id": {"schema": _TEXT}}
_WAITS = {"Retry-After": {"schema": _TEXT, "description": "Seconds."}}


def generating(answer: str, body: type[BaseModel]) -> dict[str, Any]:
    """Return the options of a route that generates: it may stream, and speaks msgpack too.

    Args:
        answer: name of the schema of a whole answer; what a stream has of it is a ``Chunk``.
        body: what is sent.
    """
    options = answering(answer, body=body, errors=[NAMES_MODEL, *OF_ENGINE])
    content = options["openapi_extra"]["responses"]["200"]["content"]
    content[EVENTS] = {"itemSchema": _event(f"{answer}Chunk")}
    content[MSGPACK] = {}  # the answer, or frames
    return options


def answering(
    answer: str, *, body: type[BaseModel] | None = None, errors: Iterable[int] = ()
) -> dict[str, Any]:
    """Return the options of a route.

    Args:
        answer: name of the answer's schema, or the media type of an answer that is text.
        body: what is sent, as JSON or msgpack.
        errors: HTTP statuses beside 500, and beside those of bodies if there is one.
    """
    content = {answer: {"schema": _TEXT}} if "/" in answer else {JSON_TYPE: {"schema": ref(answer)}}
    responses: dict[str, Any] = {
        "200": {"description": "The answer.", "headers": _HEADERS, "content": content}
    }
    for status in sorted({500, *errors, *(OF_BODIES if body is not None else ())}):
        responses[str(status)] = _error(status)
    described: dict[str, Any] = {"responses": responses}
    if body is not None:
        media = {"schema": body_schema(body)}
        described["requestBody"] = {"required": True, "content": {JSON_TYPE: media, MSGPACK: media}}
    # Without a class the framework would add that any JSON may be answered.
    return {"response_class": Response, "openapi_extra": described}


def _event(chunk: str) -> Schema:
    """Return the schema of one server-sent event."""
    data = {
        "type": "string",
        "contentMediaType": JSON_TYPE,
        "contentSchema": {"anyOf": [ref(chunk), ref("Error")]},
    }
    return an_object({"data": {"anyOf": [data, constant("[DONE]")]}}, {"event": _TEXT})


def _error(status: int) -> dict[str, Any]:
    media = {"schema": ref("Error")}
    headers = _HEADERS | (_WAITS if status in OF_ENGINE else {})
    return {
        "description": HTTPStatus(status).phrase,
        "headers": headers,
        "content": {JSON_TYPE: media, MSGPACK: media},
    }


def body_schema(model: type[BaseModel]) -> Schema:
    """Return the JSON Schema of ``model``, self-contained."""
    schema = model.model_json_schema()
    inlined: Schema = _inline(schema, schema.pop("$defs", {}))
    return inlined


def _inline(node: Any, definitions: dict[str, object]) -> Any:
    """Replace references, which would point to nowhere inside an OpenAPI document."""
    if isinstance(node, list):
        return [_inline(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inline(definitions[node["$ref"].rsplit("/", 1)[-1]], definitions)
    return {key: _inline(value, definitions) for key, value in node.items()}


def install_document(app: FastAPI) -> None:
    """Make ``app`` describe itself with our schemas, and without the 422 that it never answers."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for path in made["paths"].values():
                for described in path.values():
                    described["responses"].pop("422", None)
            components = made.setdefault("components", {})
            components["schemas"] = COMPONENTS
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
