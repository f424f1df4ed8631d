"""Answers that may be anything, but for the calls in them: those of strict tools follow their schemas.

For ``strict: true`` where the model chooses whether it calls. What stands in front of calls and behind them
is free; arguments of other tools are any JSON object.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dflash_wire.errors import InvalidRequestError
from gateway.call_forms import arguments_schema, call_tag, calls_in_a_row
from gateway.grammars import ANY_OBJECT, ANY_TEXT, SPACES, Guide, Json, regex_form, sequence_of
from gateway.parsers.held_text import WHITESPACE
from gateway.parsers.hermes_tools import OPEN
from gateway.parsers.json_call import CALL_KEYS
from gateway.parsers.llama3_tools import PYTHON_TAG, SEPARATORS
from gateway.parsers.registry import OutputFormat
from gateway.parsers.think_tags import THINK
from gateway.tool_schemas import Tool


def strict_guide(
    tools: Sequence[Tool], output_format: OutputFormat, only_one: bool
) -> Guide | None:
    """Return what an answer must be that may call tools; None if none of them is strict.

    Args:
        tools: those that may be called.
        output_format: its ``tools`` names the parser that reads calls.
        only_one: end behind the first call.

    Raises:
        InvalidRequestError: another tool has a strict one's name.
        UnsupportedParameterError: a strict tool's schema says what cannot be forced.
    """
    style = output_format.tools
    strict = [index for index, tool in enumerate(tools) if tool.function.strict]
    if style is None or not strict:
        return None
    names = [tool.function.name for tool in tools]
    for index in strict:
        if names.count(names[index]) > 1:
            place = f"tools[{index}].function.name"
            raise InvalidRequestError(f"{place}: a strict tool's name must be its own.", place)
    tags = [
        call_tag(style, tool, arguments_schema(index, tool) if index in strict else ANY_OBJECT)
        for index, tool in enumerate(tools)
    ]
    if style == "hermes":
        form = _calls_anywhere(tags, only_one)
    else:
        markers = [PYTHON_TAG, *([THINK] if output_format.reasoning else [])]
        form = _calls_or_content(calls_in_a_row(tags, style, only_one), names, markers)
    return Guide(form, f"tools[{strict[0]}].function.strict", is_free=True)


def _calls_anywhere(tags: list[Json], only_one: bool) -> Json:
    """Where the parser sees a call begin, there is one."""
    return {
        "type": "triggered_tags",
        "triggers": [OPEN],
        "tags": tags,
        "at_least_one": False,
        "stop_after_first": only_one,
    }


def _calls_or_content(calls: Json, names: Collection[str], markers: Sequence[str]) -> Json:
    """Calls and what may follow them, or what the Llama 3 parser takes for content, from its beginning on.

    The first character tells, or the first key of an object, or the name in it. A key that a call has, but
    does not begin with, is left out, and so are escapes in these places: they could spell anything.

    Args:
        names: of all tools.
        markers: what content does not begin with.
    """
    space = list(WHITESPACE)
    behind = regex_form(f"{SPACES}([{SEPARATORS}]{SPACES})?")
    text_behind = _maybe(regex_form(beginning_unlike(["{", *SEPARATORS, *space])), ANY_TEXT)
    no_string = beginning_unlike(['"', *space])
    no_name = f'name"{SPACES}:{SPACES}({no_string}|"{string_unlike(names)})'
    no_key = f'{no_string}|"({string_unlike(CALL_KEYS)}|{no_name})'
    beginning = beginning_unlike(["{", *markers, *space]) + f"|\\{{{SPACES}({no_key})"
    content = _maybe(regex_form(beginning), ANY_TEXT)
    start = regex_form(f"{SPACES}({_literal(PYTHON_TAG)}{SPACES})?")
    return sequence_of(start, _either(sequence_of(calls, behind, text_behind), content))


def string_unlike(texts: Collection[str]) -> str:
    """Return a regular expression of a JSON string, its first quote left out, that says none of ``texts``.

    It has no escapes, so a text that needs some cannot be meant.
    """
    plain = [text for text in texts if not {'"', "\\"} & set(text)]
    firsts = sorted({text[0] for text in plain if text})
    quote, inside = '"', ['"', "\\"]
    ways = [_none_of([*inside, *firsts]) + _none_of(inside) + "*" + quote]
    if "" not in plain:
        ways.append(quote)
    for first in firsts:
        rests = [text[1:] for text in plain if text.startswith(first)]
        ways.append(_literal(first) + string_unlike(rests))
    return f"({'|'.join(ways)})"


def beginning_unlike(texts: Collection[str]) -> str:
    """Return a regular expression of the shortest texts that tell that none of ``texts`` comes.

    Args:
        texts: none is empty.
    """
    firsts = sorted({text[0] for text in texts})
    ways = [_none_of(firsts)]
    for first in firsts:
        rests = [text[1:] for text in texts if text.startswith(first)]
        if "" not in rests:
            ways.append(_literal(first) + beginning_unlike(rests))
    return f"({'|'.join(ways)})"


def _none_of(characters: Sequence[str]) -> str:
    return f"[^{''.join(map(_literal, characters))}]"


def _literal(text: str) -> str:
    """Return a text as regular expressions have it, in classes of characters as well."""
    special = {c: f"\\x{ord(c):02x}" for c in text if c < " "}
    special |= {c: f"\\{c}" for c in "\\^$.|?*+-()[]{}"}
    return "".join(special.get(c, c) for c in text)


def _either(*forms: Json) -> Json:
    return {"type": "or", "elements": list(forms)}


def _maybe(*forms: Json) -> Json:
    return {"type": "optional", "content": sequence_of(*forms)}
