"""Which tools a chat may call, and what is parsed in its output."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_wire.errors import InvalidRequestError
from gateway.errors import UnsupportedParameterError
from gateway.parsers.registry import OutputFormat, ParsePlan
from gateway.parsers.think_tags import THINK
from gateway.schemas import ChatCompletionBody
from gateway.state import GatewayState
from gateway.tool_schemas import NamedChoice, Tool


def offered_tools(body: ChatCompletionBody, output_format: OutputFormat) -> Sequence[Tool]:
    """Return the tools that the model is told of: none if none may be called.

    Raises:
        InvalidRequestError: the choice does not fit the tools.
        UnsupportedParameterError: the model knows no tools, or the choice would force a call.
    """
    choice, tools = body.tool_choice or "auto", body.tools or []
    if not tools:
        if choice in ("auto", "none"):
            return []
        raise InvalidRequestError(
            "tool_choice wants a call, but there are no tools.", "tool_choice"
        )
    if choice == "none":
        return []
    if output_format.tools is None:
        raise UnsupportedParameterError(
            "tools: this model's chat template knows no tools in a format that this server can read.",
            "tools",
        )
    if isinstance(choice, NamedChoice) and all(choice.name != t.function.name for t in tools):
        raise InvalidRequestError(
            f"tool_choice names {choice.name[:64]!r}, which is none of the tools.", "tool_choice"
        )
    if choice != "auto":
        # Asking the model nicely is not forcing it, and to pretend otherwise would be worse than to refuse.
        raise UnsupportedParameterError(
            "tool_choice: this server cannot force a call, for it has no guided decoding yet; send 'auto' "
            "or 'none'.",
            "tool_choice",
        )
    return tools


def plan_parsing(
    body: ChatCompletionBody, tools: Sequence[Tool], state: GatewayState, prompt: list[int]
) -> ParsePlan | None:
    """Return what is parsed in the output of ``body``; None if it is passed on as it is.

    Args:
        tools: those that the model was told of.
        prompt: as the model gets it; it may end with the beginning of the reasoning.
    """
    chosen = state.output_format
    if chosen.reasoning is None and not tools:
        return None
    starts_in_reasoning = chosen.reasoning is not None and state.tokenizer.ends_with(prompt, THINK)
    return ParsePlan(
        reasoning=chosen.reasoning,
        starts_in_reasoning=starts_in_reasoning,
        tools=chosen.tools if tools else None,
        tool_names=frozenset(tool.function.name for tool in tools),
        most_calls=1 if body.parallel_tool_calls is False else None,
    )
