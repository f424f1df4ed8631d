"""Chooses what builds a response: the quick way, unless the request asks for more than text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from gateway.detailed_responses import DetailedBuilder
from gateway.framing import Framing
from gateway.preparation import Prepared
from gateway.responses import ResponseBuilder, ResponseHead, ResponseShape
from gateway.schemas import GenerationBody
from gateway.state import GatewayState


def make_builder(
    state: GatewayState,
    body: GenerationBody,
    prepared: Prepared,
    shape: ResponseShape,
    framing: Framing,
) -> ResponseBuilder:
    """Return the builder of one chat or text completion."""
    settings = state.settings
    make: Callable[..., ResponseBuilder] = ResponseBuilder
    if body.wants_running_usage or prepared.plans[0].is_detailed:
        make = partial(
            DetailedBuilder,
            wants_running_usage=body.wants_running_usage,
            tokenizer=state.tokenizer,
        )
    return make(
        ResponseHead(prepared.response_id, settings.model_id, settings.system_fingerprint),
        shape,
        prepared.plans,
        settings.default_policy,
        wants_stats=body.wants_stats,
        wants_usage_chunk=body.wants_usage_chunk,
        framing=framing,
    )
