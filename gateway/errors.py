"""Errors as HTTP: the classes only HTTP has, the response shape, and the handlers.

The tree is ``dflash_wire.errors``; this adds what an engine cannot raise:

InvalidRequestError
    UnsupportedParameterError   400  a known parameter that this server does not implement
NotFoundError
    ModelNotFoundError          404  the request names another model
ClientError
    MethodNotAllowedError       405  the route exists, the method does not
    UnsupportedMediaTypeError   415  the body is not declared as JSON

Every error leaves as ``{"error": {"message", "type", "param", "code"}}``.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from dflash_wire.errors import (
    ClientError,
    DFlashError,
    InvalidRequestError,
    NotFoundError,
    RetryableError,
)
from gateway.metrics import GatewayMetrics
from gateway.msgpack_framing import object_response

RETRY_AFTER_S = 1


class UnsupportedParameterError(InvalidRequestError):
    """A parameter of the OpenAI API or of a known extension that is not implemented here."""

    code = "unsupported_parameter"


class ModelNotFoundError(NotFoundError):
    """The request names a model that is not served here."""

    code = "model_not_found"


class MethodNotAllowedError(ClientError):
    """The route exists, but not with this method."""

    code = "method_not_allowed"
    status = 405


class UnsupportedMediaTypeError(ClientError):
    """The body is not declared as JSON."""

    code = "unsupported_media_type"
    status = 415


def error_body(error: DFlashError) -> dict[str, Any]:
    """Return OpenAI's nested error object."""
    return {
        "error": {
            "message": error.message,
            "type": error.error_type,
            "param": error.param,
            "code": error.code,
        }
    }


def error_response(
    error: DFlashError, headers: dict[str, str] | None = None, accept: str | None = None
) -> Response:
    """Return ``error`` as a response; errors that may pass carry ``Retry-After``.

    Args:
        accept: the request's header of that name; JSON unless it asks for msgpack.
    """
    extra = dict(headers or {})
    if isinstance(error, RetryableError):
        extra.setdefault("Retry-After", str(RETRY_AFTER_S))
    return object_response(error_body(error), accept, error.status, extra)


def internal_error(request_id: str) -> DFlashError:
    """Return what a client sees of a bug: nothing but the id under which it was logged."""
    return DFlashError(f"Internal error; report it with request id {request_id}.")


def from_http_exception(error: HTTPException, method: str, path: str) -> DFlashError:
    """Translate what the router raises by itself."""
    if error.status_code == 404:
        return NotFoundError(f"There is no route {method} {path}.")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return MethodNotAllowedError(f"{path} does not answer {method}; use {allowed}.")
    if error.status_code < 500:
        return InvalidRequestError(str(error.detail))
    return DFlashError(str(error.detail))


def install_error_handlers(app: FastAPI, metrics: GatewayMetrics) -> None:
    """Make every error of ``app`` leave in OpenAI's shape and be counted by its code."""

    async def on_dflash_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, DFlashError)
        metrics.count_error(error.code)
        return error_response(error, accept=request.headers.get("accept"))

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        translated = from_http_exception(error, request.method, request.url.path)
        metrics.count_error(translated.code)
        accept = request.headers.get("accept")
        return error_response(translated, dict(error.headers or {}), accept)

    async def on_validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        translated = InvalidRequestError(f"{where}: {first['msg']}.", where)
        metrics.count_error(translated.code)
        return error_response(translated, accept=request.headers.get("accept"))

    app.add_exception_handler(DFlashError, on_dflash_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(RequestValidationError, on_validation_error)
