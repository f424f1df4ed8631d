"""Which tools a chat may or must call, and what is parsed in its output."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_wire.errors import InvalidRequestError
from gateway.call_forms import call_form
from gateway.chat_tokenizer import ChatTokenizer
from gateway.errors import UnsupportedParameterError
from gateway.grammars import Guide, answer_guide, behind_reasoning
from gateway.parsers.registry import OutputFormat, ParsePlan
from gateway.parsers.think_tags import END_THINK, THINK
from gateway.schemas import ChatCompletionBody
from gateway.state import GatewayState
from gateway.strict_calls import strict_guide
from gateway.tool_schemas import NamedChoice, Tool


def offered_tools(body: ChatCompletionBody, output_format: OutputFormat) -> Sequence[Tool]:
    """Return the tools that the model is told of: none if none may be called.

    Raises:
        InvalidRequestError: the choice does not fit the tools.
        UnsupportedParameterError: the model knows no tools.
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
    return tools


def chat_guide(
    body: ChatCompletionBody, tools: Sequence[Tool], output_format: OutputFormat
) -> Guide | None:
    """Return what an answer must be: calls that are demanded, else the form that is asked for, else anything
    in which calls of strict tools follow their schemas.

    Args:
        tools: those that the model is told of. Where it may call them, an answer of a form may be calls.

    Raises:
        InvalidRequestError: a field about the form is wrong.
        UnsupportedParameterError: a schema says what cannot be forced.
    """
    style, choice = output_format.tools, body.tool_choice
    if not tools or style is None:
        return answer_guide(body)
    if isinstance(choice, NamedChoice):
        return Guide(call_form(tools, style, True, choice.name), "tool_choice")
    only_one = body.parallel_tool_calls is False
    if choice == "required":
        return Guide(call_form(tools, style, only_one), "tool_choice")
    guide = answer_guide(body)
    if guide is None:
        return strict_guide(tools, output_format, only_one)
    either = [guide.form, call_form(tools, style, only_one)]
    return guide._replace(form={"type": "or", "elements": either})


def reasoned(
    guide: Guide, parse: ParsePlan | None, tokenizer: ChatTokenizer, prompt: list[int]
) -> Guide:
    """Return the guide of a whole output: what the model thinks, where it does, is free."""
    if parse is None or parse.reasoning is None or tokenizer.ends_with(prompt, END_THINK):
        return guide
    return behind_reasoning(guide, parse.starts_in_reasoning)


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
    is_named = isinstance(body.tool_choice, NamedChoice)
    return ParsePlan(
        reasoning=chosen.reasoning,
        starts_in_reasoning=starts_in_reasoning,
        tools=chosen.tools if tools else None,
        tool_names=frozenset(tool.function.name for tool in tools),
        most_calls=1 if body.parallel_tool_calls is False or is_named else None,
    )
