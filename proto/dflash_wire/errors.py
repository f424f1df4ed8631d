"""Every error this project raises on purpose, as one tree.

DFlashError
    ClientError                 the request is wrong; sending it again will not help
        InvalidRequestError         400  a value is wrong or a parameter is not supported
            ContextLengthError      400  prompt plus output do not fit the model's context
        NotFoundError               404  no such model or route
        PayloadTooLargeError        413  the body is larger than the server accepts
    RetryableError              the server could not do it now; the same request may succeed later
        OverloadedError             429  the queue is full
        EngineUnavailableError      503  the engine is starting, draining, or lost an actor
            ExecutorLostError       503  an executor is gone while others are; all will be replaced
        ExecutorsReplacedError      503  all executors are new: steps in flight are lost, sequences are not
    RequestCancelledError       499  the client went away; never sent to anyone, only logged
    FatalError                  500  the engine cannot go on; health checks fail and it is replaced
        ConfigError                 500  the configuration cannot work; raised at start, never later

``code`` is stable and used in metrics and response bodies; ``error_type`` is OpenAI's vocabulary.
"""

from __future__ import annotations


class DFlashError(Exception):
    """Base of all deliberate errors.

    Args:
        message: one sentence for the person who can act on it.
        param: name of the offending request field, if there is one.
    """

    code: str = "internal_error"
    status: int = 500
    error_type: str = "server_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


class ClientError(DFlashError):
    """The request itself is at fault."""

    code = "invalid_request"
    status = 400
    error_type = "invalid_request_error"


class InvalidRequestError(ClientError):
    """A field has a wrong value, or names something that is not supported."""

    code = "invalid_value"


class ContextLengthError(InvalidRequestError):
    """Prompt plus requested output do not fit the model's context."""

    code = "context_length_exceeded"


class NotFoundError(ClientError):
    """No such model or route."""

    code = "not_found"
    status = 404
    error_type = "not_found_error"


class AuthenticationError(ClientError):
    """A key is missing or wrong."""

    code = "invalid_api_key"
    status = 401
    error_type = "authentication_error"


class PayloadTooLargeError(ClientError):
    """The request body is larger than the server accepts."""

    code = "payload_too_large"
    status = 413


class RetryableError(DFlashError):
    """Not possible now; the same request may succeed later."""

    code = "unavailable"
    status = 503
    error_type = "server_error"


class OverloadedError(RetryableError):
    """The queue is full."""

    code = "overloaded"
    status = 429
    error_type = "rate_limit_error"


class EngineUnavailableError(RetryableError):
    """The engine is starting, draining, or has lost an actor."""

    code = "engine_unavailable"


class ExecutorLostError(EngineUnavailableError):
    """An executor is gone, which another noticed; the health check has all of them replaced."""

    code = "executor_lost"


class ExecutorsReplacedError(RetryableError):
    """All executors are new and hold nothing. Between ring and coordinator only: sequences prefill again."""

    code = "executors_replaced"


class RequestCancelledError(DFlashError):
    """The client went away; nobody is left to read this."""

    code = "request_cancelled"
    status = 499


class FatalError(DFlashError):
    """The engine cannot go on and must be replaced."""

    code = "engine_failed"


class ConfigError(FatalError):
    """The configuration cannot work. Raised at start, never later."""

    code = "bad_config"


def _subclasses(root: type[DFlashError]) -> list[type[DFlashError]]:
    found = [root]
    for child in root.__subclasses__():
        found.extend(_subclasses(child))
    return found


def error_to_wire(error: BaseException) -> dict[str, str | None]:
    """Return a plain dict that ``error_from_wire`` turns back into an error of the same class."""
    if isinstance(error, DFlashError):
        return {"code": error.code, "message": error.message, "param": error.param}
    return {
        "code": FatalError.code,
        "message": f"{type(error).__name__}: {error}",
        "param": None,
    }


def error_from_wire(data: dict[str, str | None]) -> DFlashError:
    """Rebuild an error from ``error_to_wire``; unknown codes become ``FatalError``."""
    by_code = {cls.code: cls for cls in reversed(_subclasses(DFlashError))}
    cls = by_code.get(str(data.get("code")), FatalError)
    return cls(str(data.get("message")), data.get("param"))
