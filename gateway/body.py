"""Reads a request body: declared as JSON or msgpack, small enough, valid, and of the right shape."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TypeVar

import msgpack
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from dflash_wire.errors import InvalidRequestError, PayloadTooLargeError, RequestCancelledError
from gateway.base_schemas import CONTRADICTION
from gateway.errors import UnsupportedMediaTypeError
from gateway.msgpack_framing import MSGPACK_NAMES

Model = TypeVar("Model", bound=BaseModel)


async def read_model(request: Request, model: type[Model], max_bytes: int) -> Model:
    """Return the body as ``model``.

    Raises:
        UnsupportedMediaTypeError: the content type is neither JSON nor msgpack.
        PayloadTooLargeError: more than ``max_bytes``; the rest is not read.
        InvalidRequestError: not what it is declared to be, or a field has a wrong value.
        RequestCancelledError: the client left while sending.
    """
    is_msgpack = check_content_type(request.headers.get("content-type"))
    raw = await _read_bytes(request, max_bytes)
    if is_msgpack:
        raw = json_of_msgpack(raw)
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise describe(error) from error


def check_content_type(value: str | None) -> bool:
    """Return whether ``value`` names msgpack.

    Raises:
        UnsupportedMediaTypeError: it names neither that nor JSON.
    """
    media_type = (value or "").split(";")[0].strip().lower()
    if media_type in MSGPACK_NAMES:
        return True
    if media_type == "application/json":
        return False
    if media_type.startswith("application/") and media_type.endswith("+json"):
        return False
    got = f"not {media_type!r}" if media_type else "but none was sent"
    raise UnsupportedMediaTypeError(
        f"Content-Type must be application/json or application/msgpack, {got}."
    )


def json_of_msgpack(raw: bytes) -> bytes:
    """Return a msgpack body as JSON, so that both are checked by the same code.

    Raises:
        InvalidRequestError: it is no msgpack, or has what JSON has not (binary data, keys that are no text).
    """
    try:
        return json.dumps(msgpack.unpackb(raw)).encode()
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        reason = str(error) or type(error).__name__
        raise InvalidRequestError(
            f"The body is not msgpack that JSON could say: {reason[:200]}."
        ) from error


async def _read_bytes(request: Request, max_bytes: int) -> bytes:
    too_large = PayloadTooLargeError(f"The body is larger than {max_bytes} bytes.")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > max_bytes:
                raise too_large
    except ClientDisconnect as error:
        raise RequestCancelledError("The client left while sending its request.") from error
    return bytes(body)


def describe(error: ValidationError) -> InvalidRequestError:
    """Return the first problem of a failed validation as one sentence."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return InvalidRequestError(f"The body is not valid JSON. {first['msg']}.")
    param = param_name(first["loc"])
    if param is None and first["type"] == CONTRADICTION:
        return InvalidRequestError(f"{first['msg']}.")
    if param is None:
        return InvalidRequestError("The body must be a JSON object.")
    if first["type"] == "missing":
        return InvalidRequestError(f"{param} is required.", param)
    if first["type"] == "extra_forbidden":
        return InvalidRequestError(f"{param} is not a known field.", param)
    return InvalidRequestError(f"{param}: {first['msg'].rstrip('.')}.", param)


def param_name(loc: Sequence[int | str]) -> str | None:
    """Write a location as clients know it: ``("messages", 0, "role")`` -> ``messages[0].role``."""
    name = ""
    for part in loc:
        if isinstance(part, int):
            name += f"[{part}]"
        else:
            name += f".{part}" if name else part
    return name or None
