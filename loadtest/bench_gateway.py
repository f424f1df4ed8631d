"""What the gateway alone costs: ``make bench-gateway`` (Linux).

An engine without models gives 32 streams a block of 4 tokens every 64 ms: 2,000 tokens per second. The same
events go out through a bare uvicorn app, our gateway behind Serve's Python proxy, and our gateway behind
HAProxy. Every repeat visits all three; one table of medians, last line JSON. CPU time is that of the
processes that serve: the bare app, or gateway replica and proxy (``ProxyActor``, or HAProxy and its manager).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, aclosing
from pathlib import Path

from tqdm import tqdm

from loadtest.bench_report import rotated
from loadtest.bench_rows import ApiClient
from loadtest.cpu_time import command, descendants
from loadtest.gateway_report import BARE, HAPROXY, PROXY, evaluate, render_table, to_json
from loadtest.paced_client import Edge, PacedClient, Parts, RequestCell, StreamCell
from loadtest.processes import (
    BenchError,
    ReadyChild,
    Server,
    Worker,
    accept_interrupts,
    free_port,
)

PARTS = {
    "gateway": re.compile(r"ray::ServeReplica:.*:Gateway"),
    "proxy": re.compile(r"ray::(ProxyActor|HAProxyManager)|\S*haproxy\s"),
}
IMPORT_PATH = "services.bench_gateway_app:build"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_gateway", description=__doc__)
    parser.add_argument("--edges", default=f"{BARE},{PROXY},{HAPROXY}", help="what to measure")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--step-ms", type=float, default=64.0, help="one block per stream and step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="length of a window")
    parser.add_argument("--warm-up", type=float, default=2.0, help="seconds before a window")
    parser.add_argument("--requests", type=int, default=100, help="short requests per repeat")
    parser.add_argument("--start-timeout", type=float, default=300.0, help="seconds")
    options = parser.parse_args(arguments)
    options.edges = options.edges.split(",")
    if unknown := set(options.edges) - {BARE, PROXY, HAPROXY}:
        parser.error(f"--edges: {', '.join(sorted(unknown))} is none of {BARE}, {PROXY}, {HAPROXY}")
    if BARE not in options.edges:
        parser.error(f"--edges needs {BARE!r}: the others are compared with it")
    if min(options.streams, options.repeats, options.requests) < 1:
        parser.error("--streams, --repeats and --requests are at least 1")
    if min(options.step_ms, options.seconds, options.warm_up) <= 0:
        parser.error("--step-ms, --seconds and --warm-up are positive")
    return options


def server_environment(has_haproxy: bool) -> dict[str, str]:
    """Return what a server of our own needs beside our environment, in one of Serve's two modes."""
    return {
        # Two servers run side by side: neither may join the other's cluster or take its ports.
        "RAY_ADDRESS": "local",
        "RAY_SERVE_ENABLE_HA_PROXY": str(int(has_haproxy)),
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": str(int(has_haproxy)),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        "RAY_SERVE_HAPROXY_NBTHREAD": os.environ.get("RAY_SERVE_HAPROXY_NBTHREAD", "1"),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
    }


def start_edge(stack: ExitStack, name: str, folder: Path, options: argparse.Namespace) -> Edge:
    """Start one edge and return it when it is ready.

    Raises:
        BenchError: it is not ready in time.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    print(f"Starting: {name} on port {port}", file=sys.stderr)
    child: ReadyChild
    if name == BARE:
        module = ["-m", "loadtest.bare_app"]
        settings = ["--port", str(port), "--step-ms", str(options.step_ms)]
        child = ReadyChild([sys.executable, *module, *settings])
    else:
        config = folder / f"{name}.yaml"  # JSON is YAML
        config.write_text(json.dumps(serve_config(port, options.step_ms)))
        child = Server(config, server_environment(name == HAPROXY))
    stack.enter_context(child)
    child.wait_ready(url, options.start_timeout)
    model = ApiClient(url).model_id()
    if name == BARE:
        return Edge(name, url, model, lambda: {"gateway": (child.process.pid,)})
    return Edge(name, url, model, lambda: find_parts(child.process.pid))


def serve_config(port: int, step_ms: float) -> dict[str, object]:
    """Return what ``serve run`` reads."""
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": "dflash",
                "route_prefix": "/",
                "import_path": IMPORT_PATH,
                "args": {"step_ms": step_ms},
            }
        ],
    }


def find_parts(pid: int) -> Parts:
    """Return the processes of every part below a server.

    Raises:
        BenchError: a part has none.
    """
    commands = {pid: command(pid) for pid in descendants(pid)}
    parts = {
        part: tuple(pid for pid, line in commands.items() if pattern.match(line))
        for part, pattern in PARTS.items()
    }
    if missing := [part for part, pids in parts.items() if not pids]:
        raise BenchError(f"no process found for: {', '.join(missing)}")
    return parts


async def measure_all(
    edges: Sequence[Edge], options: argparse.Namespace
) -> tuple[list[StreamCell], list[RequestCell]]:
    """Visit every edge ``repeats`` times, in rotating order."""
    by_name = {edge.name: edge for edge in edges}
    step_s = options.step_ms * 1e-3
    streams, requests = [], []
    async with aclosing(PacedClient()) as client:
        for edge in edges:  # warm-up
            await client.requests(edge, 10)
        with tqdm(total=len(edges) * options.repeats, unit="cell") as progress:
            for repeat in range(options.repeats):
                for name in rotated([edge.name for edge in edges], repeat):
                    edge = by_name[name]
                    progress.set_postfix_str(name)
                    windows = (options.warm_up, options.seconds)
                    streams.append(await client.streams(edge, options.streams, step_s, *windows))
                    requests.append(await client.requests(edge, options.requests))
                    progress.update()
    return streams, requests


def detokenizing_ms() -> float:
    """Return the CPU milliseconds of detokenizing 1,000 tokens in blocks of 4."""
    with Worker("services.bench_detokenize") as worker:
        return float(worker.read()["ms_per_1000_tokens"])


def run(options: argparse.Namespace) -> None:
    """Run the comparison and print it.

    Raises:
        BenchError: a server or a request failed.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        edges = [start_edge(stack, name, folder, options) for name in options.edges]
        streams, requests = asyncio.run(measure_all(edges, options))
    report = evaluate(streams, requests, detokenizing_ms())
    settings: dict[str, object] = {
        "streams": options.streams,
        "step_ms": options.step_ms,
        "repeats": options.repeats,
        "seconds": options.seconds,
    }
    print(render_table(report))
    print(to_json(report, settings))


def main() -> None:
    """Command line entry."""
    accept_interrupts()
    try:
        run(parse_arguments())
    except BenchError as error:
        sys.exit(f"bench-gateway: {error}")


if __name__ == "__main__":
    main()
