"""Ends work as soon as the client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from dflash_wire.errors import RequestCancelledError

Result = TypeVar("Result")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Run ``work``, and cancel it when the client closes the connection.

    Returns only after ``work`` has ended, cleaned up included, in every case.

    Args:
        receive: the request's ASGI channel; its body must have been read.

    Raises:
        RequestCancelledError: the client went away first.
    """
    job = asyncio.create_task(work)
    watch = asyncio.create_task(_client_gone(receive))
    try:
        await asyncio.wait({job, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            raise RequestCancelledError("The client closed the connection.")
        return job.result()
    finally:
        job.cancel()
        watch.cancel()
        await asyncio.gather(job, watch, return_exceptions=True)


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
