"""Tools in chat bodies: what may be called, what should be, and what was."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema

from gateway.base_schemas import StrictBody, problem

Json = dict[str, Any]
FunctionName = Annotated[str, Field(min_length=1, max_length=128)]


def _check_arguments(text: str) -> str:
    """Refuse arguments that are no JSON object: templates show them to the model as one."""
    arguments = parse_arguments(text)
    if not isinstance(arguments, dict) or not _is_text(arguments):
        raise problem("must be a JSON object, written as a string")
    return text


def parse_arguments(text: str) -> Any:
    """Return a call's arguments; None if they are not JSON. No text stands for no arguments."""
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None


def _is_text(value: object) -> bool:
    """Whether UTF-8 can say it: escapes of JSON can spell halves of characters."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return False
    return True


class CalledFunction(StrictBody):
    """Name and arguments of a call that the model has made."""

    name: FunctionName
    arguments: Annotated[str, AfterValidator(_check_arguments)]


class ToolCall(StrictBody):
    """A call in an assistant's turn."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> Json:
        """Return what chat templates read: arguments as an object."""
        arguments = parse_arguments(self.function.arguments)
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class Function(StrictBody):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON Schema of the arguments.")
    strict: bool | None = Field(
        None,
        description="Arguments follow `parameters` in every call. Calls that `tool_choice` or a form "
        "demands follow them anyhow.",
    )


class Tool(StrictBody):
    """One of the request's tools."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> Json:
        """Return what chat templates read."""
        function: Json = {"name": self.function.name}
        for name in ("description", "parameters"):
            if (value := getattr(self.function, name)) is not None:
                function[name] = value
        return {"type": "function", "function": function}


class NamedChoice(NamedTuple):
    """A ``tool_choice`` that names a function."""

    name: str


def _read_choice(value: object) -> object:
    if value in ("none", "auto", "required"):
        return value
    if isinstance(value, dict) and value.get("type") == "function":
        function = value.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return NamedChoice(function["name"])
    raise problem("must be 'none', 'auto', 'required' or an object that names a function")


ToolChoice = Annotated[
    str | NamedChoice,
    PlainValidator(_read_choice),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["none", "auto", "required"]},
                {
                    "type": "object",
                    "properties": {
                        "type": {"const": "function"},
                        "function": {
                            "type": "object",
                            "properties": {"name": {"type": "string"}},
                            "required": ["name"],
                        },
                    },
                    "required": ["type", "function"],
                },
            ]
        }
    ),
]


def num_chars(tools: Sequence[Tool], calls: Sequence[ToolCall]) -> int:
    """Return at most how many characters of a prompt these are, white space of the template left out."""
    texts = [json.dumps(tool.function.parameters or {}) for tool in tools]
    texts += [tool.function.description or "" for tool in tools]
    texts += [call.function.arguments for call in calls]
    return sum(map(len, texts))
