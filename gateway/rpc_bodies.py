"""gRPC messages as the bodies of the HTTP API, and its answers as messages."""

from __future__ import annotations

import json
from typing import Any

from google.protobuf.message import Message
from pydantic import ValidationError

from dflash_wire.errors import InvalidRequestError
from dflash_wire.v1 import generation_pb2 as pb
from gateway.body import describe
from gateway.errors import UnsupportedParameterError
from gateway.parameters import is_neutral
from gateway.parsers.deltas import CallArguments, CallStart, ContentDelta, Delta, ReasoningDelta
from gateway.schemas import ChatCompletionBody, CompletionBody

Json = dict[str, Any]
OWN = frozenset(
    {"prompt_token_ids", "conversation", "tools", "enable_thinking", "more_json", "logit_bias"}
)
"""Fields of a request that the HTTP body has in another form."""


NOT_TOLD = ("stream", "stream_options")
"""Fields of the HTTP body that ask for what these messages do not have: the call says whether it streams."""


def as_body(request: pb.GenerateRequest) -> ChatCompletionBody | CompletionBody:
    """Return the HTTP body that asks for the same.

    Raises:
        InvalidRequestError: there is no input, or a field has a wrong value.
        UnsupportedParameterError: it asks for what has no place in a message.
    """
    fields = _more_fields(request.more_json)
    fields |= {name: value for name, value in _set_fields(request).items() if name not in OWN}
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidRequestError("Send a prompt, prompt_token_ids or a conversation.", "prompt")
    if request.tools:
        fields["tools"] = [_tool(index, tool) for index, tool in enumerate(request.tools)]
    if request.HasField("enable_thinking"):
        fields["chat_template_kwargs"] = {"enable_thinking": request.enable_thinking}
    if request.logit_bias:
        biases = sorted(request.logit_bias.items())  # a message's map has no order
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in biases}
    if kind == "conversation":
        if request.HasField("logprobs"):
            fields |= {"logprobs": True, "top_logprobs": request.logprobs}
        fields["messages"] = [_chat_message(message) for message in request.conversation.messages]
    elif kind == "prompt_token_ids":
        fields["prompt"] = list(request.prompt_token_ids.ids)
    model = ChatCompletionBody if kind == "conversation" else CompletionBody
    try:
        return model.model_validate_json(json.dumps(fields))
    except RecursionError as error:
        raise InvalidRequestError("The request is nested too deeply.") from error
    except ValidationError as error:
        raise describe(error) from error


def _set_fields(message: Message) -> Json:
    """Return the fields that were set, zeros too where the message can tell."""
    fields: Json = {}
    for field, value in message.ListFields():
        if field.is_repeated:
            fields[field.name] = list(value)
        else:
            fields[field.name] = _set_fields(value) if isinstance(value, Message) else value
    return fields


def _more_fields(text: str) -> Json:
    if not text:
        return {}
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise InvalidRequestError("more_json must be a JSON object.", "more_json")
    for name in NOT_TOLD:
        if not is_neutral(fields.get(name), (False,)):
            raise UnsupportedParameterError(f"{name} is not supported over gRPC.", name)
    return fields


def _tool(index: int, tool: pb.Tool) -> Json:
    function: Json = {"name": tool.name}
    if tool.HasField("description"):
        function["description"] = tool.description
    if tool.HasField("strict"):
        function["strict"] = tool.strict
    if tool.HasField("parameters_json"):
        try:
            function["parameters"] = json.loads(tool.parameters_json)
        except (ValueError, RecursionError) as error:
            place = f"tools[{index}].parameters_json"
            raise InvalidRequestError(f"{place} must be a JSON object.", place) from error
    return {"type": "function", "function": function}


def _chat_message(message: pb.ChatMessage) -> Json:
    fields: Json = {"role": message.role, "content": message.content}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if message.HasField(name):
            fields[name] = getattr(message, name)
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return fields


def usage_message(usage: Json) -> pb.Usage:
    """Return OpenAI's usage object as a message."""
    return pb.Usage(
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        total_tokens=usage["total_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        reasoning_tokens=usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0),
    )


def stats_messages(stats: Json | list[Json] | None) -> list[pb.Stats]:
    """Return the ``dflash`` object or objects of an answer as messages."""
    found = stats if isinstance(stats, list) else [] if stats is None else [stats]
    return [pb.Stats(**one) for one in found]


def response_message(answer: Json, ignored: list[str]) -> pb.GenerateResponse:
    """Return a whole answer of the HTTP API as a message."""
    return pb.GenerateResponse(
        id=answer["id"],
        model=answer["model"],
        created=answer["created"],
        choices=[_choice(choice) for choice in answer["choices"]],
        usage=usage_message(answer["usage"]),
        stats=stats_messages(answer.get("dflash")),
        ignored_fields=ignored,
    )


def _choice(choice: Json) -> pb.Choice:
    message = choice.get("message") or {"content": choice.get("text")}
    return pb.Choice(
        index=choice["index"],
        text=message["content"] or "",
        reasoning_content=message.get("reasoning_content", ""),
        tool_calls=[
            pb.ToolCall(id=call["id"], **call["function"]) for call in message.get("tool_calls", [])
        ],
        finish_reason=choice["finish_reason"],
        token_ids=choice.get("token_ids", []),
    )


def add_delta(chunk: pb.GenerateChunk, delta: Delta) -> None:
    """Add a parsed delta. Mutates ``chunk``."""
    match delta:
        case ContentDelta(text):
            chunk.text += text
        case ReasoningDelta(text):
            chunk.reasoning_content += text
        case CallStart(call, call_id, name):
            chunk.tool_calls.append(pb.ToolCallDelta(index=call, id=call_id, name=name))
        case CallArguments(call, text):
            chunk.tool_calls.append(pb.ToolCallDelta(index=call, arguments=text))
