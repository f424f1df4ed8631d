"""Requests that schemathesis makes up from ``/openapi.json``, and what it finds wrong about the answers."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgpack
import schemathesis
from schemathesis.engine import events, from_schema
from schemathesis.hooks import unregister

MSGPACK = "application/msgpack"
MOST_TOKENS = 6
"""No answer needs to be longer."""
REQUEST_TIMEOUT_S = 120
GENERATING = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
ADMIN = frozenset({"/admin/policy", "/debug/block_scheduler"})
ADMIN_KEY = "fuzzing-has-a-key"
MODEL_BOUND = (
    ("dflash",),
    ("stream_options",),
    ("tools", "tool_choice", "parallel_tool_calls"),
    ("response_format", "structured_outputs", "text"),
    ("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    ("max_tokens", "max_completion_tokens", "max_output_tokens"),
    ("stop_token_ids",),
    ("logit_bias",),
    ("allowed_token_ids",),
    ("bad_words",),
    ("min_tokens",),
    ("top_logprobs",),
    ("chat_template_kwargs",),
    ("n",),
)
"""Fields whose schema allows values that this model, or other fields, forbid."""
PROMPTS = ("the fox", ["one", "two"], [5, 6, 7], [[5], [6, 7]])
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "negative_data_rejection",
    "unsupported_method",
)
REFUSALS = ["400", "401", "403", "404", "405", "413", "415"]
"""Of wrong requests: a wrong one may be too large besides."""


@dataclass
class FuzzReport:
    """What a run did."""

    statuses: Counter[str] = field(default_factory=Counter)
    """Answers by operation and status."""
    failures: dict[str, str] = field(default_factory=dict)
    """One request for each thing that went wrong."""
    errors: list[str] = field(default_factory=list)
    """What kept the run from trying something."""

    @property
    def num_cases(self) -> int:
        return sum(self.statuses.values())

    def __str__(self) -> str:
        lines = [f"{self.num_cases} cases"]
        lines += [f"{label}: {count}" for label, count in sorted(self.statuses.items())]
        lines += [f"FAILED {what}\n    {how}" for what, how in self.failures.items()]
        return "\n".join([*lines, *self.errors])


@schemathesis.serializer(MSGPACK)
def pack(context: schemathesis.SerializationContext, value: Any) -> bytes:
    return msgpack.packb(value, default=str)


@schemathesis.deserializer(MSGPACK)
def unpack(context: schemathesis.DeserializationContext, response: Any) -> Any:
    return msgpack.unpackb(response.content)


def fuzz_config(max_examples: int, seed: int, tries_boundaries: bool = True) -> schemathesis.Config:
    """Return a configuration that tries every operation, with valid and with wrong data.

    Args:
        tries_boundaries: of one field after another, before random requests.
    """
    on, off = {"enabled": True}, {"enabled": False}
    return schemathesis.Config.from_dict(
        {
            "seed": seed,
            "generation": {"max-examples": max_examples, "database": "none", "no-shrink": True},
            "checks": {
                **off,
                **dict.fromkeys(CHECKS, on),
                "negative_data_rejection": {**on, "expected-statuses": REFUSALS},
            },
            "phases": {
                "stateful": off,
                "examples": off,
                "coverage": {"enabled": tries_boundaries},
            },
            "continue-on-failure": True,
            "request-timeout": REQUEST_TIMEOUT_S,
        }
    )


def fuzz(schema: Any, model: str) -> FuzzReport:
    """Send everything that ``schema`` makes up. Bodies name ``model`` where they name any, mostly."""
    report = FuzzReport()

    def before_call(context: Any, case: Any, kwargs: Any) -> None:
        steer(case, model)

    schemathesis.hook(before_call)
    try:
        for event in from_schema(schema).execute():
            if isinstance(event, events.ScenarioFinished):
                take(report, event.recorder)
            elif isinstance(event, events.NonFatalError):
                report.errors.append(f"{event.label}: {event.info.title} {event.info.message}")
            elif isinstance(event, events.FatalError):
                report.errors.append(repr(event.exception))
    finally:
        unregister(before_call)
    return report


def steer(case: Any, model: str) -> None:
    """Make requests reach further than the first check that depends on the model. Mutates.

    Left as they are: wrong bodies, and one in a few of the others. What is changed depends on the body alone.
    """
    chance = random.Random(f"{case.body!r} {case.path_parameters!r} {case.query!r}")
    if chance.random() < 0.3:
        case.headers["Accept"] = MSGPACK
    if case.path in ADMIN and chance.random() < 0.7:
        case.headers["Authorization"] = f"Bearer {ADMIN_KEY}"
    if "model_id" in (case.path_parameters or {}) and chance.random() < 0.7:
        case.path_parameters["model_id"] = model
    body = case.body
    if not isinstance(body, dict) or not case.meta.generation.mode.is_positive:
        return
    if "model" in body and chance.random() < 0.95:
        body["model"] = model
    if case.path not in GENERATING:
        return
    least = chance.choice([0.8, 1.0])
    for names in MODEL_BOUND:
        if chance.random() < least:
            for name in names:
                body.pop(name, None)
    if "prompt" in body and chance.random() < 0.8:
        body["prompt"] = chance.choice(PROMPTS)
    key = "max_output_tokens" if case.path == "/v1/responses" else "max_completion_tokens"
    body.setdefault(key, chance.randint(1, MOST_TOKENS))


def take(report: FuzzReport, recorder: Any) -> None:
    """Add one scenario. Mutates ``report``."""
    for case_id, interaction in recorder.interactions.items():
        response = interaction.response
        if response is not None:
            report.statuses[f"{recorder.label} {response.status_code}"] += 1
        for node in recorder.checks.get(case_id, ()):
            if node.failure_info is None:
                continue
            failure = node.failure_info.failure
            request = interaction.request
            body = request.body or b""
            text = body if isinstance(body, str) else body[:2000].decode(errors="replace")
            answer = (
                "" if response is None else f"{response.status_code} {response.content[:400]!r}"
            )
            key = f"{recorder.label}: {failure.title}: {failure.message[:200]}"
            said = f"{request.method} {request.uri} {json.dumps(text)} -> {answer}"
            report.failures.setdefault(key, said)
