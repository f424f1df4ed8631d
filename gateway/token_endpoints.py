"""``/tokenize``, ``/detokenize`` and ``/load``: what clients and balancers ask beside generating."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from dflash_wire.errors import EngineUnavailableError
from dflash_wire.gauges import GroupGauges
from gateway.body import read_model
from gateway.openapi import answering
from gateway.parameters import ignored_fields_header
from gateway.state import GatewayState, StateProvider
from gateway.token_bodies import DetokenizeBody, TokenizeBody
from gateway.validation import check_model, check_token_ids


def token_router(provider: StateProvider) -> APIRouter:
    """Return the routes that neither generate nor belong to OpenAI's API."""
    router = APIRouter(tags=["tokens"])

    @router.post("/tokenize", **answering("Tokens", body=TokenizeBody, errors=[404, 503]))
    async def tokenize(request: Request) -> Response:
        """Return the token ids of a text, or of a conversation as the model gets it."""
        state = provider()
        body = await read_model(request, TokenizeBody, state.settings.max_body_bytes)
        _check_name(body.model, state)
        token_ids = await _encode(body, state)
        answer: dict[str, object] = {
            "count": len(token_ids),
            "max_model_len": state.settings.max_context,
            "tokens": token_ids,
        }
        if body.return_token_strs:
            answer["token_strs"] = state.tokenizer.token_names(token_ids)
        return JSONResponse(answer, headers=ignored_fields_header(list(body.extras)))

    @router.post("/detokenize", **answering("Text", body=DetokenizeBody, errors=[404, 503]))
    async def detokenize(request: Request) -> Response:
        """Return the text of token ids, special tokens included."""
        state = provider()
        body = await read_model(request, DetokenizeBody, state.settings.max_body_bytes)
        _check_name(body.model, state)
        check_token_ids(body.tokens, state.settings.vocab_size, "tokens")
        text = await state.tokenizer.decode(body.tokens)
        return JSONResponse({"prompt": text}, headers=ignored_fields_header(list(body.extras)))

    @router.get("/load", **answering("Load", errors=[503]))
    async def load() -> Response:
        """Return how many sequences run or wait, in all and in every engine group."""
        groups = await provider().engine.gauges()
        if not groups:
            raise EngineUnavailableError("No engine group answers yet.")
        loads = [_group_load(group) for group in groups]
        total = sum(group.num_running + group.num_waiting for group in groups)
        return JSONResponse({"server_load": total, "engine_groups": loads})

    return router


def _check_name(model: str | None, state: GatewayState) -> None:
    if model is not None:
        check_model(model, state.settings)


async def _encode(body: TokenizeBody, state: GatewayState) -> list[int]:
    if body.messages is None:
        wants_special = body.add_special_tokens is not False
        (token_ids,) = await state.tokenizer.encode_texts([body.prompt or ""], wants_special)
        return token_ids
    options = body.chat_template_kwargs
    return await state.tokenizer.encode_chat(
        [message.for_template() for message in body.messages],
        None if options is None else options.enable_thinking,
        [tool.for_template() for tool in body.tools or []],
        begins_answer=body.add_generation_prompt is not False,
    )


def _group_load(group: GroupGauges) -> dict[str, object]:
    return {
        "group": group.group,
        "num_running": group.num_running,
        "num_waiting": group.num_waiting,
        "num_outstanding_tokens": group.num_outstanding_tokens,
    }
