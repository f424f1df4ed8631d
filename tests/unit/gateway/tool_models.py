"""Models that know tools and reasoning, as far as the gateway sees them: tokenizers with such templates."""

from __future__ import annotations

from dataclasses import replace

from gateway_fakes import FakeEngine, Item, Script, Served
from transformers import PreTrainedTokenizerFast

from drafter.training.demo.tokenizer import train_tokenizer
from gateway.app import create_app
from gateway.chat_tokenizer import ChatTokenizer
from gateway.metrics import GatewayMetrics
from gateway.state import GatewaySettings, GrammarCheck

HERMES = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Call: <tool_call>{}</tool_call><|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}{% endif %}"
)
LLAMA3 = (
    '{% if tools %}Respond with {"name": function name, "parameters": dictionary}.\n{% endif %}'
    "{% for message in messages %}<|start_header_id|>{{ message.role }}\n{{ message.content }}"
    "{% endfor %}<|start_header_id|>assistant\n"
)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
TEXTS = ["the quick brown fox jumps over the lazy dog", '{"name": "add", "arguments": {"a": 1}}']


def tool_tokenizer(template: str, *special: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with ``template``, and with tokens of their own for ``special`` texts."""
    tokenizer = train_tokenizer(TEXTS * 20, vocab_size=330)
    tokenizer.chat_template = template
    tokenizer.add_special_tokens(
        {"extra_special_tokens": list(special)}, replace_extra_special_tokens=False
    )
    return tokenizer


def served_by(
    tokenizer: PreTrainedTokenizerFast,
    settings: GatewaySettings,
    script: Script | list[Item],
    grammar_check: GrammarCheck | None = None,
    max_body_bytes: int = 40_000,
) -> Served:
    """Return an app with room for the prompts of tools."""
    settings = replace(
        settings, max_context=4000, max_body_bytes=max_body_bytes, vocab_size=len(tokenizer)
    )
    engine, metrics = FakeEngine(script), GatewayMetrics()
    app = create_app(
        *(engine, ChatTokenizer(tokenizer), settings), grammar_check=grammar_check, metrics=metrics
    )
    return Served(app, engine, metrics)
