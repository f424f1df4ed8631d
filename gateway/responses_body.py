"""Body of ``POST /v1/responses``, and the chat request it stands for."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, ValidationError, WithJsonSchema

from dflash_wire.errors import InvalidRequestError
from gateway.base_schemas import StrictBody, problem
from gateway.body import describe
from gateway.errors import UnsupportedParameterError
from gateway.parameters import Neutral, is_neutral, refusal
from gateway.response_input import Json, chat_messages
from gateway.schemas import ChatCompletionBody, ChatTemplateOptions, DFlashOptions, Stops

UNSUPPORTED: dict[str, Neutral] = {
    "background": (False,),
    "conversation": (),
    "context_management": ([],),
    "include": ([],),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({}, {"effort": None}, {"effort": None, "summary": None}),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream_options": ({}, {"include_obfuscation": False}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    # Of the chat API alone: what they ask for has no place in this one's answers.
    "messages": (),
    "n": (1,),
    "max_tokens": (),
    "max_completion_tokens": (),
    "logprobs": (False,),
    "prompt_logprobs": (),
    "echo": (False,),
    "return_token_ids": (False,),
    "response_format": ({"type": "text"},),
}
"""Known fields that are not offered, with the values that ask for nothing."""
PASSED_ON = (
    *("model", "temperature", "top_p", "top_k", "seed", "stop", "stream", "user", "metadata"),
    *("safety_identifier", "prompt_cache_key", "priority", "cache_salt", "dflash"),
    *("chat_template_kwargs", "parallel_tool_calls"),
)
RENAMED = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""Fields of a chat request as this API calls them."""


def _check_input(value: object) -> object:
    is_items = isinstance(value, list) and all(isinstance(item, dict) for item in value)
    if not isinstance(value, str) and not is_items:
        raise problem("must be a string or a list of items")
    return value


Input = Annotated[
    str | list[dict[str, Any]],
    PlainValidator(_check_input),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]


class TextOptions(StrictBody):
    """What the text of an answer is like."""

    format: dict[str, Any] | None = Field(
        None, description="As chat's response_format, name and schema beside the type."
    )
    verbosity: Literal["medium"] | None = None


class ResponsesBody(StrictBody):
    """A stateless request: all of the conversation is in ``input``, and nothing is stored."""

    model: str
    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: Stops = ()
    stream: bool | None = None
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: ChatTemplateOptions | None = None
    dflash: DFlashOptions | None = None


def _extras(body: ResponsesBody) -> Json:
    """Return the fields that the chat request knows, or lists as ignored.

    Raises:
        UnsupportedParameterError: a field is known, not offered, and asks for something.
    """
    extras: Json = {}
    for name, value in body.extras.items():
        if name not in UNSUPPORTED:
            extras[name] = value
        elif not is_neutral(value, UNSUPPORTED[name]):
            raise UnsupportedParameterError(refusal(name, UNSUPPORTED[name]), name)
    return extras


def as_chat(body: ResponsesBody) -> ChatCompletionBody:
    """Return the chat request that has the same answer.

    Raises:
        InvalidRequestError: a field has a wrong value.
        UnsupportedParameterError: an item or a tool is of a kind that is not offered.
    """
    values = body.model_dump(exclude_unset=True)
    fields = _extras(body)
    fields |= {name: values[name] for name in PASSED_ON if values.get(name) is not None}
    fields["messages"] = chat_messages(body.input, body.instructions)
    if body.max_output_tokens is not None:
        fields["max_completion_tokens"] = body.max_output_tokens
    if body.tools:
        fields["tools"] = [_chat_tool(index, tool) for index, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        fields["tool_choice"] = _chat_choice(body.tool_choice)
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _response_format(body.text.format)
    try:
        text = json.dumps(fields, allow_nan=False)
    except ValueError as error:
        raise InvalidRequestError("The body holds NaN or Infinity, which JSON has not.") from error
    try:
        return ChatCompletionBody.model_validate_json(text)
    except ValidationError as error:
        raise renamed(describe(error)) from error


def renamed(error: InvalidRequestError) -> InvalidRequestError:
    """Return ``error`` of the chat request with the names of this API."""
    if error.param is None:
        return error
    root = error.param.split("[")[0].split(".")[0]
    if root not in RENAMED:
        return error
    return type(error)(error.message.replace(root, RENAMED[root]), RENAMED[root])


def _chat_tool(index: int, tool: Json) -> Json:
    if tool.get("type") != "function":
        kind = str(tool.get("type"))[:40]
        raise UnsupportedParameterError(
            f"tools[{index}]: only functions are supported, not {kind!r}.", f"tools[{index}].type"
        )
    function = {name: tool[name] for name in tool if name != "type"}
    return {"type": "function", "function": function}


def _response_format(form: Json) -> Json:
    if form.get("type") != "json_schema":
        return form
    named = {name: value for name, value in form.items() if name != "type"}
    return {"type": "json_schema", "json_schema": named}


def _chat_choice(choice: Any) -> Any:
    if not isinstance(choice, dict) or choice.get("type") != "function":
        return choice
    return {"type": "function", "function": {"name": choice.get("name")}}
