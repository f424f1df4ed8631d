"""Turns a checked body into engine requests: everything that depends on the served model."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, replace

from dflash_wire.drafters import DEFAULT_DRAFTER, NO_DRAFTER, find_drafter
from dflash_wire.errors import ContextLengthError, InvalidRequestError
from dflash_wire.records import GenerationRequest
from dflash_wire.sampling import SamplingParams
from gateway.choice_seeds import SEED_RANGE, choice_seed
from gateway.errors import ModelNotFoundError
from gateway.parsers.registry import ParsePlan
from gateway.processors import check_min_tokens, check_processors, request_processors
from gateway.schemas import GenerationBody, Prompts
from gateway.state import GatewaySettings

_STATIC_POLICY = re.compile(r"static(-tree)?:([1-9][0-9]{0,5})")
_NAMED_POLICIES = ("adaptive", "adaptive-chain", "table", "off")


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """One sequence of a request: what the engine gets, and what the gateway watches for."""

    index: int
    """Its place in the response's ``choices``."""
    request: GenerationRequest
    stop_strings: tuple[str, ...]
    drafter: str = DEFAULT_DRAFTER
    """Name under which statistics count it, until the engine says which policy it has: ``none`` if
    nothing is drafted."""
    min_tokens: int = 0
    """Output tokens before stop strings count."""
    is_first_choice: bool = True
    """Of its prompt; the others are further answers to the same prompt."""
    includes_stop: bool = False
    """What ends the sequence is part of its text."""
    returns_token_ids: bool = False
    echo: str | None = None
    """The prompt's text, if it is part of the answer."""
    tells_prompt_logprobs: bool = False
    parse: ParsePlan | None = None
    """What is parsed in its output; None: nothing."""

    @property
    def is_detailed(self) -> bool:
        """Whether its pieces carry more than text."""
        asks = (self.request.num_logprobs, self.request.num_prompt_logprobs, self.echo, self.parse)
        return self.returns_token_ids or any(one is not None for one in asks)


def check_model(name: str, settings: GatewaySettings) -> None:
    """Raise ``ModelNotFoundError`` unless ``name`` is the served model."""
    if name != settings.model_id:
        raise ModelNotFoundError(
            f"The model {name[:200]!r} does not exist; this server has {settings.model_id!r}.",
            "model",
        )


def check_body(body: GenerationBody, settings: GatewaySettings) -> None:
    """Check what can be checked before tokenizing.

    Raises:
        ModelNotFoundError: another model is asked for.
        InvalidRequestError: fields contradict each other or do not fit the model.
    """
    check_model(body.model, settings)
    both = (body.max_tokens, body.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise InvalidRequestError(
            "max_tokens and max_completion_tokens differ; send one of them.", "max_tokens"
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options needs stream to be true.", "stream_options")
    check_token_ids(body.stop_token_ids or [], settings.vocab_size, "stop_token_ids")
    check_processors(body, settings)
    drafters = settings.all_drafters
    drafter = drafters[find_drafter(drafters, drafter_name(body, settings))]
    if body.dflash is not None and body.dflash.policy is not None:
        check_policy(body.dflash.policy, drafter.max_draft_block_size, settings.max_tree_positions)


def drafter_name(body: GenerationBody, settings: GatewaySettings) -> str | None:
    """Return the drafter that a request names or that its thinking mode has; None is the default one."""
    if body.dflash is not None and body.dflash.drafter is not None:
        return body.dflash.drafter
    if body.enables_thinking is None:
        return None
    return settings.thinking_drafter if body.enables_thinking else settings.non_thinking_drafter


def drafter_label(policy: str, drafter: str | None) -> str:
    """Return the name under which statistics count a sequence."""
    return NO_DRAFTER if policy == "off" else drafter or DEFAULT_DRAFTER


def check_policy(policy: str, max_draft_block_size: int, max_tree_positions: int) -> None:
    """Raise ``InvalidRequestError`` unless ``policy`` is one that requests may choose."""
    match = _STATIC_POLICY.fullmatch(policy)
    if policy in _NAMED_POLICIES:
        return
    if match:
        is_tree = match[1] is not None and max_draft_block_size > 1
        if 2 <= int(match[2]) <= (max_tree_positions if is_tree else max_draft_block_size):
            return
    raise InvalidRequestError(
        "dflash.policy must be 'adaptive', 'adaptive-chain', 'table', 'off', 'static:<w>' with w from 2 to "
        f"{max_draft_block_size} or 'static-tree:<n>' with n from 2 to {max_tree_positions}, "
        f"not {policy[:40]!r}.",
        "dflash.policy",
    )


def check_prompts(prompts: Prompts, settings: GatewaySettings) -> None:
    """Raise ``InvalidRequestError`` for too many prompts or token ids outside the vocabulary."""
    if len(prompts) > settings.max_choices_per_request:
        raise InvalidRequestError(
            f"At most {settings.max_choices_per_request} prompts per request, "
            f"not {len(prompts)}; send several requests.",
            "prompt",
        )
    for prompt in prompts:
        if isinstance(prompt, list):
            check_token_ids(prompt, settings.vocab_size, "prompt")


def check_token_ids(token_ids: list[int], vocab_size: int, param: str) -> None:
    """Raise ``InvalidRequestError`` for an id outside the vocabulary."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{param}: token ids must be from 0 to {vocab_size - 1}.", param
            )


def plan_sequences(
    body: GenerationBody,
    prompt_token_ids: list[list[int]],
    settings: GatewaySettings,
    response_id: str,
    prompt_param: str,
    parse: ParsePlan | None = None,
) -> list[SequencePlan]:
    """Return the plans of all choices: those of the first prompt, those of the second, and so on.

    Args:
        prompt_token_ids: one list per prompt.
        response_id: prefix of the engine's request ids. Ours, hence unique; a client's
            ``X-Request-Id`` may repeat.
        prompt_param: the field to blame when a prompt is empty or too long.
        parse: what is parsed in the output of each.

    Raises:
        InvalidRequestError: a prompt has no tokens, or there are too many choices.
        ContextLengthError: a prompt and its output do not fit the context.
    """
    num_choices = body.n or 1
    num_sequences = num_choices * len(prompt_token_ids)
    if num_sequences > settings.max_choices_per_request:
        raise InvalidRequestError(
            f"n times the prompts is {num_sequences}; at most {settings.max_choices_per_request} choices "
            "are possible per request.",
            "n",
        )
    plans: list[SequencePlan] = []
    for token_ids in prompt_token_ids:
        first = _first_choice(body, token_ids, settings, prompt_param)
        first = replace(first, parse=parse)
        for choice in range(num_choices):
            index = len(plans)
            plans.append(_choice_plan(first, choice, index, f"{response_id}-{index}"))
    return plans


def _first_choice(
    body: GenerationBody, token_ids: list[int], settings: GatewaySettings, prompt_param: str
) -> SequencePlan:
    policy = body.dflash.policy if body.dflash else None
    drafter = drafter_name(body, settings)
    return SequencePlan(
        index=0,
        request=GenerationRequest(
            request_id="",
            prompt_token_ids=token_ids,
            max_tokens=output_budget(body, len(token_ids), settings.max_context, prompt_param),
            sampling=sampling_params(body, settings),
            stop_token_ids=stop_token_ids(body, settings),
            policy=policy,
            cache_salt=body.cache_salt or "",
            priority=body.priority or 0,
            drafter=drafter,
            processors=request_processors(body, stop_token_ids(body, settings), settings),
            num_logprobs=body.num_logprobs,
            num_prompt_logprobs=body.num_prompt_logprobs,
        ),
        stop_strings=body.stop,
        min_tokens=body.min_tokens or 0,
        drafter=drafter_label(policy or settings.default_policy, drafter),
        includes_stop=bool(body.include_stop_str_in_output),
        returns_token_ids=bool(body.return_token_ids),
        tells_prompt_logprobs=body.prompt_logprobs is not None,
    )


def _choice_plan(first: SequencePlan, choice: int, index: int, request_id: str) -> SequencePlan:
    """Return the plan of a prompt's ``choice``-th answer, made from the first one's."""
    sampling = first.request.sampling
    seed = choice_seed(sampling.seed, choice)
    request = replace(first.request, request_id=request_id, sampling=replace(sampling, seed=seed))
    return replace(first, index=index, request=request, is_first_choice=choice == 0)


def output_budget(
    body: GenerationBody, num_prompt_tokens: int, max_context: int, prompt_param: str
) -> int:
    """Return the most tokens the output may have; all that remains if the request is silent."""
    if num_prompt_tokens == 0:
        raise InvalidRequestError("The prompt has no tokens; send some text.", prompt_param)
    remaining = max_context - num_prompt_tokens
    if remaining < 1:
        raise ContextLengthError(
            f"The prompt has {num_prompt_tokens} tokens, but this model's context is "
            f"{max_context} tokens, output included; shorten the prompt.",
            prompt_param,
        )
    wanted = body.max_completion_tokens or body.max_tokens or remaining
    if wanted > remaining:
        raise ContextLengthError(
            f"This model's context is {max_context} tokens, but the prompt has "
            f"{num_prompt_tokens} and {wanted} are asked for; ask for at most {remaining}.",
            "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        )
    check_min_tokens(body, wanted)
    return wanted


def sampling_params(body: GenerationBody, settings: GatewaySettings) -> SamplingParams:
    """Return the request's sampling, completed by the model's defaults and a fresh seed."""
    defaults = settings.sampling
    top_k = defaults.top_k if body.top_k is None else body.top_k
    seed = secrets.randbelow(SEED_RANGE) if body.seed is None else body.seed % SEED_RANGE
    temperature = defaults.temperature if body.temperature is None else body.temperature
    mode = body.dflash.sampling if body.dflash else None
    return SamplingParams(
        temperature=temperature,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        top_k=min(max(top_k, 0), settings.vocab_size),
        seed=seed,
        min_p=defaults.min_p if body.min_p is None else body.min_p,
        rejects=defaults.rejects if mode is None else mode == "rejection",
    )


def stop_token_ids(body: GenerationBody, settings: GatewaySettings) -> list[int]:
    """Return the ids that end a sequence, each once, sorted."""
    end_of_sequence = () if body.ignore_eos else settings.eos_token_ids
    return sorted({*(body.stop_token_ids or []), *end_of_sequence})
