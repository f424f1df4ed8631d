"""Which parsers there are, which a model needs, and what one request makes of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from jinja2 import Environment, TemplateSyntaxError, meta

from dflash_wire.errors import ConfigError
from gateway.parsers.hermes_tools import OPEN as HERMES_CALL
from gateway.parsers.hermes_tools import HermesTools
from gateway.parsers.llama3_tools import Llama3Tools
from gateway.parsers.output_parser import OutputParser, ToolParser
from gateway.parsers.think_tags import END_THINK, THINK, ThinkTags

AUTO, NONE = "auto", "none"
TOOL_PARSERS: dict[str, Callable[[Collection[str]], ToolParser]] = {
    "hermes": HermesTools,
    "llama3_json": Llama3Tools,
}
REASONING_PARSERS: dict[str, type[ThinkTags]] = {"think_tags": ThinkTags}
MARKERS = {
    "hermes": HermesTools.MARKERS,
    "llama3_json": Llama3Tools.MARKERS,
    "think_tags": ThinkTags.MARKERS,
}
"""Tokens that a parser must see although some tokenizers call them special."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """What a model's output is made of: names of parsers, None where there is nothing to parse."""

    reasoning: str | None = None
    tools: str | None = None


@dataclass(frozen=True, slots=True)
class ParsePlan:
    """What is parsed in the output of one request."""

    reasoning: str | None = None
    starts_in_reasoning: bool = False
    tools: str | None = None
    tool_names: frozenset[str] = frozenset()
    most_calls: int | None = None

    @property
    def markers(self) -> frozenset[str]:
        """Tokens that must be shown as text, should the tokenizer call them special."""
        names = [name for name in (self.reasoning, self.tools) if name is not None]
        return frozenset(marker for name in names for marker in MARKERS[name])

    def new_parser(self) -> OutputParser:
        """Return the parser of one sequence."""
        reasoning = None
        if self.reasoning is not None:
            reasoning = REASONING_PARSERS[self.reasoning](self.starts_in_reasoning)
        tools = None if self.tools is None else TOOL_PARSERS[self.tools](self.tool_names)
        return OutputParser(reasoning, tools, self.most_calls)


def choose_format(reasoning: str, tools: str, template: str | None) -> OutputFormat:
    """Return the parsers of a model.

    Args:
        reasoning: name of a parser, ``auto`` to choose it by the chat template, or ``none``.
        tools: the same.
        template: the model's chat template; None if it has none.

    Raises:
        ConfigError: there is no parser of that name.
    """
    return OutputFormat(
        _chosen(reasoning, REASONING_PARSERS, _reasoning_of(template or "")),
        _chosen(tools, TOOL_PARSERS, _tools_of(template or "")),
    )


def _chosen(name: str, known: Collection[str], by_template: str | None) -> str | None:
    if name == AUTO:
        return by_template
    if name == NONE:
        return None
    if name not in known:
        raise ConfigError(f"there is no parser {name!r}, only {AUTO}, {NONE}, {', '.join(known)}")
    return name


def _reasoning_of(template: str) -> str | None:
    return "think_tags" if THINK in template or END_THINK in template else None


def _tools_of(template: str) -> str | None:
    """Return the format in which a template tells the model to call tools; None if none is known."""
    if "tools" not in template_variables(template):
        return None
    if HERMES_CALL in template:
        # Qwen3-Coder's calls have the same tags, but XML between them.
        return None if "<function=" in template else "hermes"
    is_llama = "<|start_header_id|>" in template
    return "llama3_json" if is_llama and '"parameters"' in template else None


def template_variables(template: str) -> set[str]:
    """Return the names that a template reads from outside, or all its words if it has tags of its own."""
    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateSyntaxError:
        return set(re.findall(r"[A-Za-z_]+", template))
    return meta.find_undeclared_variables(parsed)
