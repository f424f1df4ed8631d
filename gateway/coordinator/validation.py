"""What the coordinator refuses, before a request costs anything."""

from __future__ import annotations

from dflash_wire.drafters import find_drafter
from dflash_wire.errors import ConfigError, ContextLengthError, InvalidRequestError
from dflash_wire.ports import EngineLimits
from dflash_wire.records import GenerationRequest
from gateway.coordinator.policy import BlockPolicy, parse_policy


def check_limits(limits: EngineLimits) -> None:
    """Check that an engine with these limits can run at all.

    Raises:
        ConfigError: a limit is too small.
    """
    least = {
        "num_pages": 1,
        "page_size": 1,
        "max_rows": 1,
        "max_context": 2,
        "max_draft_block_size": 1,
        "max_step_positions": max(1, limits.max_draft_block_size),
    }
    for name, minimum in least.items():
        value = getattr(limits, name)
        if value < minimum:
            raise ConfigError(f"{name} is {value}; it must be at least {minimum}.")


def check_engine(limits: EngineLimits, max_waiting: int, default_policy: str) -> None:
    """Check that a coordinator can run.

    Raises:
        ConfigError: with the reason.
    """
    check_limits(limits)
    if max_waiting < 1:
        raise ConfigError(f"max_waiting is {max_waiting}; it must be at least 1.")
    check_default_policy(default_policy, limits)


def check_request(request: GenerationRequest, limits: EngineLimits) -> int:
    """Check a request against the engine's limits.

    Returns:
        The length at which its sequence ends, prompt included.

    Raises:
        ContextLengthError: the prompt, or prompt plus output, does not fit the engine.
        InvalidRequestError: the prompt is empty or ``max_tokens`` is not positive.
    """
    num_prompt = len(request.prompt_token_ids)
    if num_prompt == 0:
        raise InvalidRequestError("The prompt is empty; send at least one token.")
    if request.max_tokens < 1:
        raise InvalidRequestError(
            f"max_tokens is {request.max_tokens}; it must be at least 1.", "max_tokens"
        )
    if num_prompt > limits.max_context - 1:
        raise ContextLengthError(
            f"The prompt has {num_prompt} tokens, but this model's context of "
            f"{limits.max_context} leaves room for {limits.max_context - 1}; shorten the prompt."
        )
    max_length = min(num_prompt + request.max_tokens, limits.max_context)
    num_slots = limits.num_pages * limits.page_size
    if max_length > num_slots:
        raise ContextLengthError(
            f"{num_prompt} prompt tokens and up to {max_length - num_prompt} new ones exceed the "
            f"{num_slots} tokens this engine can cache; shorten the prompt or lower max_tokens.",
            "max_tokens",
        )
    return max_length


def choose_drafter(
    request: GenerationRequest, default_policy: str, limits: EngineLimits
) -> tuple[int, BlockPolicy]:
    """Return the index of the drafter that drafts for a request, and the request's policy.

    Raises:
        InvalidRequestError: no such drafter or policy, or the one cannot follow the other.
    """
    drafter = find_drafter(limits.all_drafters, request.drafter)
    text = default_policy if request.policy is None else request.policy
    most = limits.all_drafters[drafter].max_draft_block_size
    return drafter, parse_policy(text, most, limits.max_tree_positions)


def check_default_policy(text: str, limits: EngineLimits) -> None:
    """Refuse a default policy that one of the drafters cannot follow.

    Raises:
        ConfigError: with the reason.
    """
    try:
        for drafter in limits.all_drafters:
            parse_policy(text, drafter.max_draft_block_size, limits.max_tree_positions)
    except InvalidRequestError as error:
        raise ConfigError(f"The default policy cannot work: {error}") from error
