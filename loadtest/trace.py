"""A timeline of drafter, verifier, coordinator and gateway under load: ``make trace``.

Serves the configuration with one and with two cohorts in flight, loads each with the same streams, and
writes what ``GET /trace`` says: open the files in https://ui.perfetto.dev or chrome://tracing. Prints what
was at work for which share of the time, and ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from loadtest import prompt_sets
from loadtest.bench_rows import ApiClient
from loadtest.closed_loop import ClosedLoop
from loadtest.processes import BenchError, accept_interrupts, add_server_arguments, start_server

Span = tuple[float, float]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.trace", description=__doc__)
    add_server_arguments(parser)
    parser.add_argument("--cohorts", default="1,2", help="what to serve with, one after the other")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--policy", default="static:4")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder of the traces")
    options = parser.parse_args(arguments)
    try:
        options.cohorts = [int(number) for number in options.cohorts.split(",")]
    except ValueError:
        parser.error("--cohorts are 1, 2 or both with a comma between them")
    if not set(options.cohorts) <= {1, 2}:
        parser.error("--cohorts are 1, 2 or both with a comma between them")
    if options.base_url and len(options.cohorts) > 1:
        parser.error("a running server has its own number of cohorts; name that with --cohorts")
    return options


def traced_config(config: dict[str, Any], num_cohorts: int) -> dict[str, Any]:
    """Return a Serve config file's content with traces on and a fixed number of cohorts."""
    (application,) = config["applications"]
    args = application.get("args") or {}
    changed = {
        **args,
        "engine": {**(args.get("engine") or {}), "cohorts": num_cohorts},
        "gateway": {**(args.get("gateway") or {}), "trace": True},
    }
    return {**config, "applications": [{**application, "args": changed}]}


def busy_shares(trace: dict[str, Any]) -> dict[str, float]:
    """Return for which share of the traced time drafter, verifier and both at once were at work.

    Args:
        trace: in Chrome's format, of one engine group at least; the first one counts.
    """
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 1]
    names = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in trace["traceEvents"]
        if e["name"] == "thread_name"
    }
    spans: dict[str, list[Span]] = {}
    for event in slices:
        span = (event["ts"], event["ts"] + event["dur"])
        spans.setdefault(names[1, event["tid"]], []).append(span)
    everything = [span for mine in spans.values() for span in mine]
    length = max(end for _, end in everything) - min(began for began, _ in everything)
    drafting, verifying = spans.get("drafter", []), spans["verifier"]
    return {
        "drafter": sum(end - began for began, end in drafting) / length,
        "verifier": sum(end - began for began, end in verifying) / length,
        "both": overlap(drafting, verifying) / length,
    }


def overlap(one: Sequence[Span], other: Sequence[Span]) -> float:
    """Return for how long spans of both are open; those of each follow one another."""
    one, other = sorted(one), sorted(other)
    total, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        total += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return total


def trace_one(options: argparse.Namespace, num_cohorts: int) -> dict[str, Any]:
    """Serve, load and trace with one number of cohorts.

    Raises:
        BenchError: the server does not start, or a request failed.
    """
    with ExitStack() as stack:
        if not options.base_url:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            config = yaml.safe_load(options.config.read_text(encoding="utf-8"))
            path = folder / options.config.name
            path.write_text(yaml.safe_dump(traced_config(config, num_cohorts)), encoding="utf-8")
            started = argparse.Namespace(**{**vars(options), "config": path})
        else:
            started = options
        url = start_server(stack, started)
        client = ApiClient(url)
        loop = ClosedLoop(url, client.model_id(), prompt_sets.load("mixed"), max_tokens=128)
        cell = asyncio.run(loop.run(options.policy, options.streams, 1.0, options.seconds))
        trace = client.call("/trace")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"trace-{num_cohorts}.json"
    path.write_text(json.dumps(trace), encoding="utf-8")
    shares = {name: round(share, 3) for name, share in busy_shares(trace).items()}
    tokens_per_s = round(cell.tokens_per_s, 1)
    return {"cohorts": num_cohorts, "tokens_per_s": tokens_per_s, **shares, "file": str(path)}


def main() -> None:
    """Command line entry."""
    options = parse_arguments()
    accept_interrupts()
    try:
        rows = [trace_one(options, num_cohorts) for num_cohorts in options.cohorts]
    except BenchError as error:
        sys.exit(str(error))
    print(f"{options.streams} streams, {options.policy}; shares of the traced time")
    print(f"{'cohorts':>7}{'tokens/s':>10}{'drafter':>9}{'verifier':>10}{'both':>7}  file")
    for row in rows:
        print(
            f"{row['cohorts']:>7}{row['tokens_per_s']:>10}{row['drafter']:>9.0%}"
            f"{row['verifier']:>10.0%}{row['both']:>7.0%}  {row['file']}"
        )
    print(json.dumps({"streams": options.streams, "policy": options.policy, "rows": rows}))


if __name__ == "__main__":
    main()
