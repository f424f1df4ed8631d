"""From a body to what the engine gets: every check, then the prompt. All that happens before the first byte.

Whatever a request came by (REST, msgpack, gRPC), it goes through here, so none of them can accept or
refuse what another does not.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace

from dflash_wire.errors import ContextLengthError, InvalidRequestError
from gateway.bad_words import add_bad_words
from gateway.grammars import answer_guide, guided
from gateway.parameters import check_parameters
from gateway.schemas import ChatCompletionBody, CompletionBody, Prompts
from gateway.state import GatewayState
from gateway.tool_choice import chat_guide, offered_tools, plan_parsing, reasoned
from gateway.tool_schemas import num_chars as num_chars_of_tools
from gateway.validation import SequencePlan, check_body, check_prompts, plan_sequences


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that passed all checks."""

    response_id: str
    plans: list[SequencePlan]
    """In the order of the response's choices."""
    ignored: list[str]
    """Fields of the body that nobody knows."""


def new_response_id(prefix: str) -> str:
    """Return an id that no other response has."""
    return f"{prefix}-{uuid.uuid4().hex}"


async def prepare_chat(state: GatewayState, body: ChatCompletionBody, response_id: str) -> Prepared:
    """Check a chat request and render its prompt.

    Raises:
        ClientError: the request is at fault.
    """
    ignored = check_parameters(body)
    check_body(body, state.settings)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true.", "top_logprobs")
    check_conversation(body, state)
    tools = offered_tools(body, state.output_format)
    guide = chat_guide(body, tools, state.output_format)
    prompt = await state.tokenizer.encode_chat(
        [message.for_template() for message in body.messages],
        body.enables_thinking,
        [tool.for_template() for tool in tools],
    )
    parse = plan_parsing(body, tools, state, prompt)
    plans = plan_sequences(body, [prompt], state.settings, response_id, "messages", parse)
    plans = add_bad_words(plans, body.bad_words or (), state.tokenizer)
    if guide is not None:
        plans = await guided(state, plans, reasoned(guide, parse, state.tokenizer, prompt))
    return Prepared(response_id, plans, ignored)


async def prepare_completion(
    state: GatewayState, body: CompletionBody, response_id: str
) -> Prepared:
    """Check a completion request and encode its prompts.

    Raises:
        ClientError: the request is at fault.
    """
    ignored = check_parameters(body)
    check_body(body, state.settings)
    check_prompts(body.prompt, state.settings)
    guide = answer_guide(body)
    prompts = await _encode_prompts(state, body.prompt)
    plans = plan_sequences(body, prompts, state.settings, response_id, "prompt")
    plans = add_bad_words(plans, body.bad_words or (), state.tokenizer)
    if guide is not None:
        plans = await guided(state, plans, guide)
    if body.echo:
        plans = [_with_echo(plan, state) for plan in plans]
    return Prepared(response_id, plans, ignored)


def _with_echo(plan: SequencePlan, state: GatewayState) -> SequencePlan:
    """Return the plan with its prompt as a part of the answer."""
    detokenizer = state.tokenizer.new_detokenizer()
    text = detokenizer.push_all(plan.request.prompt_token_ids) + detokenizer.flush()
    return replace(plan, echo=text)


def check_conversation(body: ChatCompletionBody, state: GatewayState) -> None:
    """Raise ``ContextLengthError`` for what cannot fit, before it is rendered and encoded."""
    max_context, messages = state.settings.max_context, body.messages
    if len(messages) > max_context:  # each is at least one token
        raise ContextLengthError(
            f"{len(messages)} messages are more than this model's context of {max_context} tokens "
            "can hold; send fewer.",
            "messages",
        )
    calls = [call for message in messages for call in message.tool_calls or []]
    num_chars = sum(len(m.content) + len(m.reasoning_content or "") for m in messages)
    num_chars += num_chars_of_tools(body.tools or [], calls)
    state.tokenizer.check_length(num_chars, max_context, "messages")


async def _encode_prompts(state: GatewayState, prompts: Prompts) -> list[list[int]]:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    for text in texts:
        state.tokenizer.check_length(len(text), state.settings.max_context, "prompt")
    if texts:
        return await state.tokenizer.encode_texts(texts)
    return [prompt for prompt in prompts if isinstance(prompt, list)]
