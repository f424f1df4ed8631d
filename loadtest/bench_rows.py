"""The rows of the speed comparison: each answers a prompt and says what it cost."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from loadtest.bench_report import CycleTotals, Measurement
from loadtest.processes import BenchError, Worker
from loadtest.prompt_sets import Prompt


@dataclass(frozen=True)
class BenchPrompt:
    """A prompt and, where a reference worker gave them, its token ids in the served template."""

    prompt: Prompt
    token_ids: list[int] | None


class Row(Protocol):
    """One line of the table."""

    name: str

    def measure(self, prompt: BenchPrompt, max_tokens: int, repeat: int) -> Measurement:
        """Answer ``prompt`` greedily.

        Raises:
            BenchError: there was no complete answer.
        """


class ApiClient:
    """Blocking JSON calls to one server."""

    def __init__(self, base_url: str, timeout_s: float = 600.0) -> None:
        self._base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s

    def call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """GET without a body, POST with one.

        Raises:
            BenchError: no connection, an HTTP error, or an answer that is not a JSON object.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        url = self._base_url + path
        try:
            with urlopen(Request(url, data, headers), timeout=self._timeout_s) as response:
                answer = json.load(response)
        except HTTPError as error:
            text = error.read().decode("utf-8", errors="replace")[:500]
            raise BenchError(f"{url} answered {error.code}: {text}") from error
        except (URLError, OSError, ValueError) as error:
            raise BenchError(f"{url}: {error}") from error
        if not isinstance(answer, dict):
            raise BenchError(f"{url} answered {type(answer).__name__}, not an object")
        return answer

    def model_id(self) -> str:
        """Return the first model the server lists."""
        return str(self.call("/v1/models")["data"][0]["id"])


class ServedRow:
    """A block policy of the server, asked for through HTTP without streaming.

    Args:
        client: of the server.
        model: its name.
        policy: of the row.
        drafter: who drafts; None: the server's default.
    """

    def __init__(
        self, client: ApiClient, model: str, policy: str, drafter: str | None = None
    ) -> None:
        self.name = policy if drafter is None else f"{drafter} {policy}"
        self._client = client
        self._model = model
        self._asked = {"policy": policy, "stats": True}
        if drafter is not None:
            self._asked["drafter"] = drafter

    def measure(self, prompt: BenchPrompt, max_tokens: int, repeat: int) -> Measurement:
        """See ``Row``. Prompts with token ids go to ``/v1/completions``, others to chat."""
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": max_tokens,
            "temperature": 0,
            # The reference loops compute every prompt anew, so no request here finds it cached.
            "cache_salt": f"{self.name}/{prompt.prompt.prompt_id}/{repeat}",
            "dflash": self._asked,
        }
        if prompt.token_ids is None:
            path, body["messages"] = "/v1/chat/completions", prompt.prompt.messages
        else:
            path, body["prompt"] = "/v1/completions", prompt.token_ids
        start_s = time.perf_counter()
        answer = self._client.call(path, body)
        seconds = time.perf_counter() - start_s
        return _served_measurement(answer, self.name, prompt.prompt.prompt_id, repeat, seconds)


def _served_measurement(
    answer: dict[str, Any], row: str, prompt_id: str, repeat: int, seconds: float
) -> Measurement:
    choice, stats = answer["choices"][0], answer["dflash"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    token_ids = choice.get("token_ids")
    return Measurement(
        row=row,
        prompt_id=prompt_id,
        repeat=repeat,
        seconds=seconds,
        num_tokens=answer["usage"]["completion_tokens"],
        text=text,
        token_ids=None if token_ids is None else tuple(token_ids),
        cycles=CycleTotals(
            num_cycles=stats["num_cycles"],
            num_committed=sum(stats["committed_per_cycle"]),
            draft_ms=stats["draft_ms"],
            verify_ms=stats["verify_ms"],
            overhead_ms=stats["overhead_ms"],
        ),
    )


class ReferenceRow:
    """A loop without a server, in a worker process that times itself."""

    def __init__(self, worker: Worker, name: str) -> None:
        self.name = name
        self._worker = worker

    def token_ids(self, prompt: Prompt) -> list[int]:
        """Return ``prompt`` in the served chat template, as token ids."""
        ids: list[int] = self._worker.ask({"messages": prompt.messages})["prompt_token_ids"]
        return ids

    def measure(self, prompt: BenchPrompt, max_tokens: int, repeat: int) -> Measurement:
        """See ``Row``."""
        reply = self._worker.ask({"prompt_token_ids": prompt.token_ids, "max_tokens": max_tokens})
        lengths = reply.get("acceptance_lengths")
        return Measurement(
            row=self.name,
            prompt_id=prompt.prompt.prompt_id,
            repeat=repeat,
            seconds=reply["seconds"],
            num_tokens=len(reply["token_ids"]),
            text=reply.get("text"),
            token_ids=tuple(reply["token_ids"]),
            cycles=CycleTotals(len(lengths), sum(lengths)) if lengths else None,
        )
