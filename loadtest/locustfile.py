"""Locust: chat users that stream, and measure what speculation does to a stream.

    python -m locust -f loadtest/locustfile.py --headless --host http://127.0.0.1:8000 -u 4 -t 60s

Run it from the repository root. Beside Locust's own row for the HTTP call it reports TTFT, TPOT and E2E
in milliseconds and TOKENS_PER_S as a rate; a stream that ends without [DONE], or with an error event,
counts as a failure. The run ends with exact percentiles and one line of JSON.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import gevent
import requests
from locust import HttpUser, constant, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import StopUser

from loadtest import prompt_sets
from loadtest.report import LoadRun, Sample, render, sample_row
from loadtest.sse_client import ChatStream, StreamError, read_chat_stream
from loadtest.timing import StreamTiming, stream_timing

PATH = "/v1/chat/completions"


def add_options(parser: LocustArgumentParser) -> None:
    """Add what a chat user can be told; every option has an environment variable too."""
    group = parser.add_argument_group("chat users")
    group.add_argument(
        "--policy",
        default="",
        env_var="LOADTEST_POLICY",
        help="adaptive, table, off, static:8, …; server's if empty",
    )
    group.add_argument("--max-tokens", type=int, default=128, env_var="LOADTEST_MAX_TOKENS")
    group.add_argument("--temperature", type=float, default=0.0, env_var="LOADTEST_TEMPERATURE")
    group.add_argument(
        "--prompt-set",
        default="mixed",
        env_var="LOADTEST_PROMPT_SET",
        help="set names separated by commas, 'all' or 'mixed'",
    )
    group.add_argument(
        "--model", default="", env_var="LOADTEST_MODEL", help="the first of /v1/models if empty"
    )
    group.add_argument(
        "--requests", type=int, default=0, env_var="LOADTEST_REQUESTS", help="stop after so many"
    )
    group.add_argument(
        "--rows-file",
        default="",
        env_var="LOADTEST_ROWS_FILE",
        help="write one JSON line a request",
    )


def prepare(environment: Environment, **_kwargs: object) -> None:
    """Load the prompts once and start an empty run."""
    assert environment.parsed_options is not None
    try:
        prompts = prompt_sets.load(environment.parsed_options.prompt_set)
    except ValueError as error:
        # Locust logs other exceptions of a listener and starts all the same.
        raise SystemExit(str(error)) from error
    ChatUser.prompts = itertools.cycle(prompts)
    ChatUser.tickets = itertools.count(1)
    ChatUser.num_finished = 0
    ChatUser.load_run = LoadRun()


def report(environment: Environment, **_kwargs: object) -> None:
    """Print the summary, write raw rows, and fail the process when a request failed."""
    assert environment.parsed_options is not None
    run = ChatUser.load_run
    rows_file = environment.parsed_options.rows_file
    if rows_file:
        with open(rows_file, "w", encoding="utf-8") as file:
            file.writelines(sample_row(sample) + "\n" for sample in run.samples)
    print(render(run.summary()))
    if run.num_failures or not run.samples:
        environment.process_exit_code = 1


class ChatUser(HttpUser):
    """Sends one prompt after the other and reads each answer to its end (closed loop).

    The class attributes are shared by all users of a process; greenlets switch only at network calls,
    so they need no lock.
    """

    wait_time = constant(0)
    prompts: ClassVar[Iterator[prompt_sets.Prompt]]
    tickets: ClassVar[Iterator[int]]
    num_finished: ClassVar[int]
    load_run: ClassVar[LoadRun]

    def on_start(self) -> None:
        """Find out which model the server has, unless one was named."""
        self.options = self.environment.parsed_options
        self.model = self.options.model
        if self.model:
            return
        with self.client.get("/v1/models", catch_response=True) as response:
            try:
                response.raise_for_status()
                self.model = response.json()["data"][0]["id"]
            except (requests.RequestException, ValueError, LookupError) as error:
                response.failure(f"{type(error).__name__}: {error}")
                print(f"No model found at {self.host}/v1/models: {error}", file=sys.stderr)
                self._end_run()
                raise StopUser from error

    @task
    def chat(self) -> None:
        """Stream one answer; after ``--requests`` answers of all users together, end the run."""
        limit = self.options.requests
        if 0 < limit < next(self.tickets):
            raise StopUser
        self._ask(next(self.prompts))
        ChatUser.num_finished += 1
        if ChatUser.num_finished == limit:
            self._end_run()

    def _end_run(self) -> None:
        # In a greenlet of its own: quitting kills the users, and with them a quit called by a user.
        gevent.spawn(self.environment.runner.quit)

    def _ask(self, prompt: prompt_sets.Prompt) -> None:
        start_s = time.perf_counter()
        with self.client.post(
            PATH, json=self._body(prompt), stream=True, catch_response=True
        ) as response:
            try:
                stream = self._read(response)
                timing = stream_timing(stream, start_s)
            except (StreamError, ValueError, requests.RequestException) as error:
                self.load_run.num_failures += 1
                response.failure(f"{type(error).__name__}: {error}")
                return
            response.success()
        if timing is not None:
            self._record(prompt, stream, timing)

    def _body(self, prompt: prompt_sets.Prompt) -> dict[str, Any]:
        extension: dict[str, Any] = {"stats": True}
        if self.options.policy:
            extension["policy"] = self.options.policy
        return {
            "model": self.model,
            "messages": prompt.messages,
            "max_tokens": self.options.max_tokens,
            "temperature": self.options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "dflash": extension,
        }

    def _read(self, response: Any) -> ChatStream:
        if response.status_code != 200:
            raise StreamError(f"HTTP {response.status_code}: {response.text[:300]}")
        return read_chat_stream(response.iter_content(chunk_size=None), time.perf_counter)

    def _record(self, prompt: prompt_sets.Prompt, stream: ChatStream, timing: StreamTiming) -> None:
        tau = (stream.stats or {}).get("acceptance_length")
        self.load_run.samples.append(Sample(prompt.prompt_id, timing, tau))
        metrics: dict[str, float | None] = {
            "TTFT": timing.ttft_s * 1e3,
            "TPOT": None if timing.tpot_s is None else timing.tpot_s * 1e3,
            "E2E": timing.e2e_s * 1e3,
            "TOKENS_PER_S": timing.tokens_per_s,
        }
        for name, value in metrics.items():
            if value is not None:
                self.environment.events.request.fire(
                    request_type="STREAM",
                    name=name,
                    response_time=value,
                    response_length=timing.completion_tokens,
                    exception=None,
                    context={},
                )


events.init_command_line_parser.add_listener(add_options)
events.init.add_listener(prepare)
events.quitting.add_listener(report)
