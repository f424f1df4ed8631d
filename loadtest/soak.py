"""Many minutes of random traffic, then an idle server must hold nothing: ``make soak``.

Clients send every kind of request (streams, whole answers, texts, ids, wrong ones, bursts that the
queue refuses) with every policy, and many leave before their answer is complete. The server it starts
has pools so small that preemption never stops (``configs/soak.yaml``). After a warm-up and at the end
the server is left idle: no sequence may run or wait, no page may be in use, and the memory of its
processes may have grown by 5 % at most. A few requests, the canaries, return again and again and must
always get the same text. Prints tables and ends with one line of JSON; the exit status is 1 when a bar
is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from loadtest import prompt_sets
from loadtest.bench_rows import ApiClient
from loadtest.metrics_reader import MetricsReader
from loadtest.processes import (
    BenchError,
    accept_interrupts,
    add_server_arguments,
    start_server,
)
from loadtest.soak_clients import Clients, Tally
from loadtest.soak_report import SoakReport, render
from loadtest.soak_traffic import Traffic
from loadtest.soak_watch import MemoryWatch

IDLE_TIMEOUT_S = 120.0
SAMPLE_PERIOD_S = 60.0


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.soak", description=__doc__)
    add_server_arguments(parser)
    parser.set_defaults(config=Path("configs/soak.yaml"), start_url="http://127.0.0.1:8017")
    parser.add_argument("--pid", type=int, help="of `serve run`, with --base-url: watch its memory")
    parser.add_argument("--minutes", type=float, default=20.0, help="after the warm-up")
    parser.add_argument("--warm-up-minutes", type=float, default=2.0)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the order of requests")
    options = parser.parse_args(arguments)
    if options.minutes <= 0 or options.warm_up_minutes < 0 or options.clients < 1:
        parser.error("--minutes and --clients are positive, --warm-up-minutes not negative")
    return options


class MinuteSampler:
    """Samples the memory of all roles once a minute in a thread of its own, while clients run."""

    def __init__(self, memory: MemoryWatch | None) -> None:
        self._memory = memory
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.samples_mib: list[dict[str, float]] = []

    def __enter__(self) -> MinuteSampler:
        if self._memory is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._memory is not None:
            self._thread.join()

    def _run(self) -> None:
        assert self._memory is not None
        while not self._ended.wait(SAMPLE_PERIOD_S):
            self.samples_mib.append(self._memory.read())
            print(f"{sum(self.samples_mib[-1].values()):.0f} MiB", file=sys.stderr)


def soak(options: argparse.Namespace, url: str) -> SoakReport:
    """Run warm-up and soak against a ready server.

    Raises:
        BenchError: the server does not answer.
    """
    tally = Tally()
    prompts = prompt_sets.load("mixed")
    clients = Clients(url, Traffic(ApiClient(url).model_id(), prompts, options.seed), tally)
    metrics = MetricsReader(url)
    root_pid = options.pid if options.base_url else os.getpid()
    memory = None if root_pid is None else MemoryWatch(root_pid)
    asyncio.run(clients.run(options.clients, 60 * options.warm_up_minutes))
    metrics.wait_idle(IDLE_TIMEOUT_S)
    before = memory.read() if memory else {}
    began = time.monotonic()
    with MinuteSampler(memory) as sampler:
        asyncio.run(clients.run(options.clients, 60 * options.minutes))
    minutes = (time.monotonic() - began) / 60
    idle = metrics.wait_idle(IDLE_TIMEOUT_S)
    after = memory.read() if memory else {}
    return SoakReport(minutes, tally, idle, before, after, sampler.samples_mib)


def main() -> None:
    """Command line entry."""
    accept_interrupts()
    options = parse_arguments()
    try:
        with ExitStack() as stack:
            report = soak(options, start_server(stack, options))
    except BenchError as error:
        sys.exit(f"soak: {error}")
    print(render(report))
    sys.exit(0 if all(report.bars().values()) else 1)


if __name__ == "__main__":
    main()
