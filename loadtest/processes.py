"""Child processes of a benchmark: the server, and workers that answer JSON lines."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.error import URLError
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parents[1]
LOG_TAIL_CHARS = 2000


class BenchError(Exception):
    """The benchmark cannot go on; the message says what to do."""


class ChildProcess:
    """A subprocess in a group of its own, with its messages kept for the case that it fails.

    Owner: the benchmark's main thread. Use as a context manager; leaving it ends the group.

    Args:
        command: program and arguments, run in the repository root.
        has_pipes: connect stdin and stdout as text pipes; else stdout goes to the log.
        environment: variables set for the child beside this process's own.
    """

    stop_s = 60.0
    """How long each stage of stopping may take."""

    def __init__(
        self,
        command: list[str],
        has_pipes: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = " ".join(command[1:4])
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE if has_pipes else subprocess.DEVNULL,
            stdout=subprocess.PIPE if has_pipes else self._log,
            stderr=self._log,
            env={**os.environ, **(environment or {})},
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def log_tail(self) -> str:
        """Return the end of what the child printed."""
        self._log.seek(0)
        return self._log.read().decode("utf-8", errors="replace")[-LOG_TAIL_CHARS:]

    def failure(self, what: str) -> BenchError:
        """Return an error about this child, with the end of its log."""
        return BenchError(f"{self.name}: {what}\n{self.log_tail()}")

    def stop(self) -> None:
        """End the child: as Ctrl-C would, then firmly. Safe to call twice."""
        if self._log.closed:
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            if self.process.poll() is None:
                self.process.send_signal(number)
                try:
                    self.process.wait(self.stop_s)
                except subprocess.TimeoutExpired:
                    continue
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self._log.close()


class ReadyChild(ChildProcess):
    """A child that says over HTTP when it can be used."""

    ready_path = "/ready"
    """Answers 200 once requests can be served."""

    def wait_ready(self, base_url: str, timeout_s: float) -> None:
        """Return when ``ready_path`` answers 200.

        Raises:
            BenchError: the server ended, or was not ready in time.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise self.failure(f"ended with status {self.process.returncode} at start")
            if is_ready(base_url, self.ready_path):
                return
            time.sleep(0.25)
        url = base_url + self.ready_path
        raise self.failure(f"{url} did not answer 200 within {timeout_s:.0f} s")


class Server(ReadyChild):
    """``serve run CONFIG`` as a child."""

    def __init__(self, config: Path, environment: Mapping[str, str] | None = None) -> None:
        serve = Path(sys.executable).with_name("serve")
        super().__init__([str(serve), "run", str(config)], environment=environment)


class Worker(ChildProcess):
    """``python -m MODULE …`` that reads one JSON request per line and writes one reply per line.

    Its first line is ``{"ready": true}``.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        super().__init__([sys.executable, "-m", module, *arguments], has_pipes=True)

    def wait_ready(self) -> None:
        """Return when the worker has loaded its model.

        Raises:
            BenchError: it ended or said something else.
        """
        reply = self.read()
        if not reply.get("ready"):
            raise self.failure(f"expected a ready line, got {reply}")

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request and wait for its reply.

        Raises:
            BenchError: the worker ended or replied with an error.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.failure("ended while it was needed") from None
        return self.read()

    def read(self) -> dict[str, Any]:
        """Wait for one reply.

        Raises:
            BenchError: the worker ended or replied with an error.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait(self.stop_s)
            raise self.failure(f"ended with status {self.process.returncode}")
        try:
            reply = json.loads(line)
        except ValueError:
            raise self.failure(f"wrote a line that is not JSON: {line[:200]!r}") from None
        if not isinstance(reply, dict) or "error" in reply:
            raise self.failure(f"replied {line.strip()}")
        return reply


def accept_interrupts() -> None:
    """Let Ctrl-C and SIGTERM end this process, and SIGINT the children that are stopped with it.

    A shell's background job ignores SIGINT, and so would they; and a SIGTERM that killed this process
    at once (``timeout``'s, say) would leave its children running.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def free_port() -> int:
    """Return a port of the loopback interface that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_ready(base_url: str, path: str = "/ready") -> bool:
    """Whether ``path`` answers 200 now."""
    try:
        with urlopen(f"{base_url}{path}", timeout=5) as response:
            return bool(response.status == 200)
    except (URLError, OSError):
        return False


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``start_server`` reads."""
    parser.add_argument("--base-url", help="a running server; without it one is started")
    parser.add_argument(
        "--config", type=Path, default=Path("config.yaml"), help="what a started server serves"
    )
    parser.add_argument(
        "--start-url",
        default="http://127.0.0.1:8000",
        help="where a started server listens; as http_options in --config say",
    )
    parser.add_argument("--start-timeout", type=float, default=300.0, help="seconds")


def start_server(stack: ExitStack, options: argparse.Namespace) -> str:
    """Return the base URL of a ready server, started here unless the options name one.

    Raises:
        BenchError: it is not ready, or another server has its port.
    """
    if options.base_url:
        url = str(options.base_url).rstrip("/")
        if not is_ready(url):
            raise BenchError(f"{url}/ready does not answer 200; start the server with: make serve")
        return url
    if is_ready(options.start_url):
        raise BenchError(
            f"a server runs at {options.start_url} already; use it with --base-url, or stop it"
        )
    print(f"Starting: serve run {options.config}", file=sys.stderr)
    server = stack.enter_context(Server(options.config))
    server.wait_ready(options.start_url, options.start_timeout)
    return str(options.start_url)
