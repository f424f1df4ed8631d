"""Failed requests of a task group, as one error of the bench."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp

from loadtest.processes import BenchError
from loadtest.sse_client import StreamError

FAILURES = (aiohttp.ClientError, StreamError, TimeoutError)


@contextmanager
def failing_as(what: str) -> Iterator[None]:
    """Run a task group; the first failed request ends it.

    ``except*`` reads better, but early versions of Python 3.11 put what it raises into a group again.

    Raises:
        BenchError: a request failed, and nothing else did.
    """
    try:
        yield
    except ExceptionGroup as errors:
        failed, others = errors.split(FAILURES)
        if failed is None or others is not None:
            raise
        raise BenchError(f"{what}: {failed.exceptions[0]}") from errors
