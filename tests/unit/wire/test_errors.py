"""The error tree: stable codes, HTTP statuses, and the way over the wire and back."""

from __future__ import annotations

import pickle

import pytest

from dflash_wire import errors
from dflash_wire.errors import DFlashError, FatalError, error_from_wire, error_to_wire

pytestmark = pytest.mark.unit

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, DFlashError)
]
TABLE = {  # class: (code, status, OpenAI's error type, parent)
    "DFlashError": ("internal_error", 500, "server_error", "Exception"),
    "ClientError": ("invalid_request", 400, "invalid_request_error", "DFlashError"),
    "InvalidRequestError": ("invalid_value", 400, "invalid_request_error", "ClientError"),
    "ContextLengthError": (
        "context_length_exceeded",
        400,
        "invalid_request_error",
        "InvalidRequestError",
    ),
    "NotFoundError": ("not_found", 404, "not_found_error", "ClientError"),
    "AuthenticationError": ("invalid_api_key", 401, "authentication_error", "ClientError"),
    "PayloadTooLargeError": ("payload_too_large", 413, "invalid_request_error", "ClientError"),
    "RetryableError": ("unavailable", 503, "server_error", "DFlashError"),
    "OverloadedError": ("overloaded", 429, "rate_limit_error", "RetryableError"),
    "EngineUnavailableError": ("engine_unavailable", 503, "server_error", "RetryableError"),
    "ExecutorLostError": ("executor_lost", 503, "server_error", "EngineUnavailableError"),
    "ExecutorsReplacedError": ("executors_replaced", 503, "server_error", "RetryableError"),
    "RequestCancelledError": ("request_cancelled", 499, "server_error", "DFlashError"),
    "FatalError": ("engine_failed", 500, "server_error", "DFlashError"),
    "ConfigError": ("bad_config", 500, "server_error", "FatalError"),
}


def test_table_is_complete_and_exact() -> None:
    actual = {
        cls.__name__: (cls.code, cls.status, cls.error_type, cls.__bases__[0].__name__)
        for cls in CLASSES
    }
    assert actual == TABLE


def test_codes_are_unique() -> None:
    codes = [cls.code for cls in CLASSES]
    assert len(codes) == len(set(codes)) == 15


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("param", [None, "max_tokens"])
def test_wire_keeps_the_class(cls: type[DFlashError], param: str | None) -> None:
    back = error_from_wire(error_to_wire(cls("Use fewer tokens.", param)))
    assert type(back) is cls
    assert (back.message, back.param, str(back)) == (
        "Use fewer tokens.",
        param,
        "Use fewer tokens.",
    )


@pytest.mark.parametrize("cls", CLASSES)
def test_pickle_keeps_the_class(cls: type[DFlashError]) -> None:
    """Ray carries errors of actors and handle calls as pickles."""
    back = pickle.loads(pickle.dumps(cls("Use fewer tokens.", "max_tokens")))
    assert type(back) is cls
    assert (back.message, back.param) == ("Use fewer tokens.", "max_tokens")


def test_foreign_errors_become_fatal() -> None:
    wire = error_to_wire(KeyError("seq 7"))
    assert wire == {"code": "engine_failed", "message": "KeyError: 'seq 7'", "param": None}
    assert type(error_from_wire(wire)) is FatalError


def test_unknown_codes_become_fatal() -> None:
    back = error_from_wire({"code": "from_the_future", "message": "hm", "param": None})
    assert type(back) is FatalError
    assert str(back) == "hm"
