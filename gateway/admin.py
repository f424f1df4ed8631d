"""What operators may see and change of a running server, behind the admin key."""

from __future__ import annotations

import secrets
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import JSONResponse, Response

from dflash_wire.errors import AuthenticationError, NotFoundError
from gateway.body import read_model
from gateway.openapi import answering
from gateway.state import StateProvider

MOST_DECISIONS = 512


class PolicyBody(BaseModel):
    """A new default policy."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    policy: str


def admin_router(provider: StateProvider) -> APIRouter:
    """Return the routes that need ``gateway.admin_key``, as ``Authorization: Bearer KEY``."""

    def check_key(request: Request) -> None:
        key = provider().settings.admin_key
        if key is None:
            raise NotFoundError("There is no admin key; set gateway.admin_key to use this route.")
        offered = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(offered.encode(), key.encode()):
            raise AuthenticationError("Send the admin key as 'Authorization: Bearer KEY'.")

    router = APIRouter(tags=["admin"], dependencies=[Depends(check_key)])

    @router.get("/debug/block_scheduler", **answering("Decisions", errors=[400, 401, 404, 503]))
    async def block_scheduler(
        last: Annotated[int, Query(ge=1, le=MOST_DECISIONS)] = 20,
    ) -> Response:
        """Explain the latest decisions of every block scheduler in words, newest last."""
        return JSONResponse(await provider().engine.decisions(last))

    @router.post("/admin/policy", **answering("Policy", body=PolicyBody, errors=[401, 404, 503]))
    async def policy(request: Request) -> Response:
        """Change the default block policy of all engine groups, for running requests too."""
        # Read here and not by the framework, which would read any body before the key is looked at.
        body = await read_model(request, PolicyBody, provider().settings.max_body_bytes)
        num_groups = await provider().engine.set_policy(body.policy)
        return JSONResponse({"policy": body.policy, "engine_groups": num_groups})

    return router
