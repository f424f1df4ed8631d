"""Random requests of every kind for the soak: valid ones, wrong ones, and some that are given up.

Everything is drawn from one ``random.Random``, so a seed replays the order of requests (not their
timing). Nothing here touches the network.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from loadtest.prompt_sets import Prompt

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
POLICIES = (None, "off", "static:2", "static:4", "static:8", "static:16", "static-tree:24")
TEMPERATURES = (0.0, 0.0, 0.3, 0.8, 1.2)
PROCESSORS: tuple[dict[str, Any], ...] = (
    {"frequency_penalty": 0.5},
    {"repetition_penalty": 1.2},
    {"logit_bias": {"17": 4, "300": -8}},
    {"min_p": 0.05},
    {"bad_words": [" the", "answer"]},
)
SYSTEM_TEXTS = ("", "Answer with numbers only.", "Think step by step, then say the answer. " * 12)
NUM_CANARIES = 12
LEAVES = 0.25
"""Share of valid requests whose client leaves before the answer is complete."""
MAX_CHARS = 1200
"""Longer messages are cut: with a system text and the longest output they must fit 2,048 tokens."""
VOCABULARY = range(4, 1000)
"""Token ids of prompts that are not text."""


@dataclass(frozen=True)
class Draw:
    """One request of the soak and what has to come of it."""

    kind: str
    path: str
    body: dict[str, Any] | bytes | None
    """None: a GET. Bytes: sent as they are."""
    status: int = 200
    leave_after_events: int | None = None
    """A stream whose client leaves after so many events."""
    leave_after_s: float | None = None
    """A whole answer whose client leaves after so long."""
    canary: str | None = None
    """Requests with the same canary must get the same text, whatever their policy."""

    @property
    def is_stream(self) -> bool:
        """Whether the answer is an event stream."""
        return isinstance(self.body, dict) and self.body.get("stream") is True


WRONG: tuple[tuple[str, dict[str, Any] | bytes | None, int], ...] = (
    (CHAT, b"{not json", 400),
    (CHAT, None, 405),
    ("/v1/nothing", None, 404),
    (CHAT, {"model": "another"}, 404),
    (CHAT, {"messages": []}, 400),
    (CHAT, {"temperature": "hot"}, 400),
    (CHAT, {"n": 0}, 400),
    (CHAT, {"best_of": 3}, 400),
    (CHAT, {"logit_bias": {"one": 1}}, 400),
    (CHAT, {"top_logprobs": 3}, 400),
    (CHAT, {"max_tokens": 100_000}, 400),
    (CHAT, {"dflash": {"policy": "static:999"}}, 400),
    (CHAT, {"priority": "urgent"}, 400),
    (CHAT, {"messages": [{"role": "user", "content": "word " * 5000}]}, 400),
    (COMPLETION, {"prompt": [10**9]}, 400),
    (COMPLETION, {"prompt": ""}, 400),
)
"""Path, what is wrong in an otherwise valid body, and the status that says so."""


class Traffic:
    """Draws requests. Owner: the soak's event loop.

    Args:
        model: the name that requests carry.
        prompts: conversations to choose from.
        seed: of everything that is random.
    """

    def __init__(self, model: str, prompts: Sequence[Prompt], seed: int) -> None:
        self._model = model
        self._conversations = [
            [message | {"content": message["content"][:MAX_CHARS]} for message in prompt.messages]
            for prompt in prompts
        ]
        self._random = random.Random(seed)

    def draw(self) -> Draw:
        """Return the next request."""
        kinds = (self._generation, self._wrong, self._canary, self._look)
        (make,) = self._random.choices(kinds, weights=(70, 10, 15, 5))
        return make()

    def small(self) -> Draw:
        """Return one of a burst: short, whole, not left."""
        return Draw("burst", CHAT, self._chat_body() | {"max_tokens": 16, "stream": False})

    def pause_s(self) -> float:
        """Return how long a client waits before its next request."""
        return self._random.expovariate(1 / 0.1)

    def _look(self) -> Draw:
        path = self._random.choice(("/v1/models", "/metrics", "/health", "/ready", "/version"))
        return Draw("look", path, None)

    def _wrong(self) -> Draw:
        path, wrong, status = self._random.choice(WRONG)
        body = wrong
        if isinstance(wrong, dict):
            valid = self._chat_body() if path == CHAT else self._completion_body()
            body = valid | {"stream": self._random.random() < 0.5} | wrong
        return Draw("wrong", path, body, status)

    def _canary(self) -> Draw:
        """One of a few requests that are fixed but for policy, streaming, priority and cache salt."""
        number = self._random.randrange(NUM_CANARIES)
        fixed = random.Random(number)
        body = {
            "model": self._model,
            "messages": fixed.choice(self._conversations),
            "max_tokens": fixed.choice((24, 60, 120)),
            "temperature": fixed.choice(TEMPERATURES),
            "top_p": fixed.choice((1.0, 0.9)),
            "seed": number,
        }
        body |= fixed.choice(({}, *PROCESSORS))
        stream = self._random.random() < 0.5
        body |= self._dflash() | {"stream": stream, "priority": self._random.randint(-1, 1)}
        if self._random.random() < 0.5:
            body["cache_salt"] = f"salt-{self._random.randrange(3)}"
        return Draw("canary", CHAT, body, canary=str(number))

    def _generation(self) -> Draw:
        is_chat = self._random.random() < 0.6
        body = self._chat_body() if is_chat else self._completion_body()
        body |= self._dflash()
        if self._random.random() < 0.1:
            body["dflash"] = body.get("dflash", {}) | {"sampling": "rejection"}
        if self._random.random() < 0.3:
            body |= self._random.choice(PROCESSORS)
        if self._random.random() < 0.1:
            body |= {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
        if self._random.random() < 0.1:
            body["n"] = 2
        if self._random.random() < 0.2:
            body["stop"] = self._random.sample(["\n", " is", "9", "="], k=2)
        if self._random.random() < 0.1:
            body["stop_token_ids"] = self._random.sample(VOCABULARY, k=8)
        if self._random.random() < 0.2:
            body["ignore_eos"] = True
        if self._random.random() < 0.2:
            body["cache_salt"] = f"tenant-{self._random.randrange(4)}"
        if self._random.random() < 0.3:
            body["priority"] = self._random.randint(-2, 2)
        stream = body["stream"] = self._random.random() < 0.7
        if stream and self._random.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
        draw = Draw(f"{'chat' if is_chat else 'text'} {'stream' if stream else 'whole'}", "", body)
        draw = replace(draw, path=CHAT if is_chat else COMPLETION)
        if self._random.random() >= LEAVES:
            return draw
        if stream:
            return replace(draw, leave_after_events=self._random.randint(0, 12))
        return replace(draw, leave_after_s=self._random.uniform(0.0, 0.5))

    def _dflash(self) -> dict[str, Any]:
        policy = self._random.choice(POLICIES)
        fields: dict[str, Any] = {} if policy is None else {"policy": policy}
        if self._random.random() < 0.5:
            fields["stats"] = True
        return {"dflash": fields} if fields else {}

    def _sampling(self) -> dict[str, Any]:
        sampling: dict[str, Any] = {"temperature": self._random.choice(TEMPERATURES)}
        if self._random.random() < 0.5:
            sampling["seed"] = self._random.randrange(2**40)
        if self._random.random() < 0.3:
            sampling["top_p"] = 0.9
        if self._random.random() < 0.3:
            sampling["top_k"] = self._random.choice((1, 20, 100))
        return sampling

    def _max_tokens(self) -> int:
        return self._random.choice((1, 2, 8, 16, 40, 80, 160, 300))

    def _chat_body(self) -> dict[str, Any]:
        messages = self._random.choice(self._conversations)
        system = self._random.choice(SYSTEM_TEXTS)
        if system:
            messages = [{"role": "system", "content": system}, *messages]
        body = {"model": self._model, "messages": messages, "max_tokens": self._max_tokens()}
        return body | self._sampling()

    def _completion_body(self) -> dict[str, Any]:
        texts = [c[-1]["content"] for c in self._random.sample(self._conversations, k=3)]
        ids = self._random.choices(VOCABULARY, k=self._random.choice((1, 15, 16, 17, 200)))
        prompt: Any = self._random.choice((texts[0], texts, ids, [ids, ids[:5]]))
        body = {"model": self._model, "prompt": prompt, "max_tokens": self._max_tokens()}
        return body | self._sampling()
