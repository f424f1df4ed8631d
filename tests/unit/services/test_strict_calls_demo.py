"""The embedded pair with grammars that wait for a call: every policy's tokens are plain decoding's."""

from __future__ import annotations

import json
import re

import pytest
from local_engines import END_OF_SEQUENCE, ROOT, Collector, build_engines, encoded_prompts, run

from dflash_wire.ports import EngineLimits
from dflash_wire.processors import Processors
from dflash_wire.records import GenerationRequest
from dflash_wire.sampling import SamplingParams
from gateway.chat_deltas import parsed_message
from gateway.chat_tokenizer import ChatTokenizer
from gateway.coordinator import Coordinator
from gateway.grammars import Json, behind_reasoning, grammar_text
from gateway.parsers.registry import OutputFormat, ParsePlan
from gateway.strict_calls import strict_guide
from gateway.tool_schemas import Tool
from services.local import LocalRing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Engines = tuple[LocalRing, EngineLimits]
ADD: Json = {
    "type": "object",
    "properties": {"first": {"enum": ["one", "three"]}, "second": {"type": "boolean"}},
    "required": ["first", "second"],
    "additionalProperties": False,
}
ANSWERS: Json = {
    "type": "triggered_tags",
    "triggers": ["answer is"],
    "tags": [
        {
            "type": "tag",
            "begin": "answer is ",
            "content": {"type": "regex", "pattern": "[a-z]{3},[a-z]{2}"},
            "end": ".",
        }
    ],
}
"""What the model writes of its own accord at the end of a word problem, and never goes on with like this."""


@pytest.fixture(scope="module")
def engines() -> Engines:
    # So few pages that some sequences are preempted.
    return build_engines(num_pages=40, max_rows=8, max_step_positions=192)


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.load(str(ROOT / "models/demo/target"))


def calling(tokenizer: ChatTokenizer) -> Processors:
    """What makes this model, which knows no tools, begin a call: each token of the tag is the likeliest, in
    turn, until it has come."""
    function = {"name": "add", "parameters": ADD, "strict": True}
    tools = [Tool.model_validate({"type": "function", "function": function})]
    guide = strict_guide(tools, OutputFormat("think_tags", "hermes"), only_one=False)
    assert guide is not None
    tag = tokenizer.encode_plain("<tool_call>")
    return Processors(
        repetition_penalty=10.0,
        biased_token_ids=tag,
        biases=[100.0 - 14 * i for i in range(len(tag))],
        grammar=grammar_text(behind_reasoning(guide, must_reason=False).form),
    )


def requests(tokenizer: ChatTokenizer) -> list[GenerationRequest]:
    prompts = encoded_prompts("word_problems")
    kinds = (calling(tokenizer), Processors(grammar=grammar_text(ANSWERS)), None)
    return [
        GenerationRequest(
            f"r{i}",
            prompts[i],
            (60, 140, 60)[i % 3],
            SamplingParams((0.0, 0.7, 1.0)[i // 3 % 3], seed=i),
            [END_OF_SEQUENCE],
            processors=kinds[i % 3],
            num_logprobs=0,
        )
        for i in range(18)
    ]


def text_of(tokenizer: ChatTokenizer, token_ids: list[int]) -> str:
    detokenizer = tokenizer.new_detokenizer()
    return detokenizer.push_all(token_ids) + detokenizer.flush()


def answers(
    engines: Engines, asked: list[GenerationRequest], policy: str
) -> tuple[Collector, float]:
    """What came, and tokens per cycle."""
    ring, limits = engines
    sink = Collector()
    coordinator = Coordinator(ring, sink, limits, policy)
    run(coordinator, asked, per_step=2)
    totals = coordinator.snapshot().totals
    return sink, totals.num_cycle_tokens / max(1, totals.num_cycles)


@pytest.mark.parametrize("policy", ["static:4", "static:16", "static-tree:16", "adaptive"])
def test_calls_that_begin_by_themselves_are_plain_decodings(
    policy: str, engines: Engines, tokenizer: ChatTokenizer
) -> None:
    asked = requests(tokenizer)
    plain, _ = answers(engines, asked, "off")
    got, tau = answers(engines, asked, policy)
    for request in asked:
        name = request.request_id
        assert got.answer(name) == plain.answer(name)
        one, other = (
            [entry.logprob for chunk in sink.chunks[name] for entry in chunk.logprobs or []]
            for sink in (got, plain)
        )
        assert one == pytest.approx(other, abs=1e-3)
    assert policy == "adaptive" or tau > 1.5


def test_calls_follow_their_schema_and_the_rest_is_free(
    engines: Engines, tokenizer: ChatTokenizer
) -> None:
    asked = requests(tokenizer)
    sink, _ = answers(engines, asked, "static:8")
    texts = [text_of(tokenizer, sink.tokens(request.request_id)) for request in asked]
    plan = ParsePlan("think_tags", False, "hermes", frozenset({"add"}))
    num_calls = num_free = 0
    for text in texts[0::3]:
        parser = plan.new_parser()
        message = parsed_message(parser.push(text) + parser.flush())
        for call in message["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            assert arguments["first"] in ("one", "three") and isinstance(arguments["second"], bool)
            num_calls += 1
    assert num_calls >= 6
    for text in texts[1::3]:
        begun = re.findall(r"answer is.*", text)
        assert all(re.match(r"answer is [a-z]{3},[a-z]{2}\.", one) for one in begun), text
        num_calls += len(begun)
        num_free += len(text) > 80
    assert num_calls >= 9
    assert num_free >= 4
