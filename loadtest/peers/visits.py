"""A visit: one server is started, measured at every level, and stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from loadtest.bench_report import rotated
from loadtest.bench_rows import ApiClient
from loadtest.closed_loop import Answer, Cell, ClosedLoop, acceptance_length
from loadtest.peers.metrics import read_counters
from loadtest.peers.same_tokens import check_tokens
from loadtest.peers.setups import LOOP, OURS, Setup
from loadtest.processes import BenchError, ReadyChild, Worker, start_server
from loadtest.prompt_sets import Prompt

WORKER_MODULE = "services.bench_reference"
REQUEST_ERRORS = (BenchError, ValueError)


@dataclass(frozen=True)
class Plan:
    """What every visit measures.

    ``token_ids`` are ours by prompt id; ``options`` are those of ``loadtest.processes.start_server``.
    """

    prompts: Sequence[Prompt]
    token_ids: Mapping[str, list[int]]
    levels: Sequence[int]
    policies: Sequence[str]
    warm_s: float
    measure_s: float
    max_tokens: int
    port: int
    start_timeout_s: float
    options: Namespace


@dataclass(frozen=True)
class CellResult:
    """One row at one level in one round."""

    row: str
    round: int
    cell: Cell
    acceptance_length: float | None
    client_share: float
    """CPU time of this process over wall time."""


class PeerServer(ReadyChild):
    """Another project's server as a child."""

    ready_path = "/health"

    def stop(self) -> None:
        """See ``ChildProcess``; also ends processes of the group that outlive their parent."""
        super().stop()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def visit(setup: Setup, plan: Plan, number: int) -> Iterator[CellResult]:
    """Yield the results of one visit in round ``number``, as they come.

    Raises:
        BenchError: the server did not start, encodes prompts differently, or a request failed.
    """
    if setup.peer == OURS:
        yield from _visit_ours(plan, number)
    elif setup.peer == LOOP:
        if 1 in plan.levels:
            yield _visit_loop(setup, plan, number)
    else:
        yield from _visit_peer(setup, plan, number)


def _visit_ours(plan: Plan, number: int) -> Iterator[CellResult]:
    with ExitStack() as stack:
        url = start_server(stack, plan.options)
        model = ApiClient(url).model_id()
        for level in plan.levels:
            for policy in rotated(list(plan.policies), number):
                loop = ClosedLoop(url, model, plan.prompts, plan.max_tokens)
                cell, share = _run_cell(loop, policy, level, plan)
                yield CellResult(
                    f"{OURS}/{policy}", number, cell, acceptance_length(cell.answers), share
                )


def _visit_peer(setup: Setup, plan: Plan, number: int) -> Iterator[CellResult]:
    url = f"http://127.0.0.1:{plan.port}"
    with PeerServer(setup.command, environment=setup.environment) as server:
        server.wait_ready(url, plan.start_timeout_s)
        try:
            check_tokens(ApiClient(url), setup.peer, plan.prompts, plan.token_ids)
            for level in plan.levels:
                loop = ClosedLoop(
                    *(url, "pair", plan.prompts, plan.max_tokens),
                    is_ours=False,
                    keep_alive=setup.keep_alive,
                )
                before = read_counters(url)
                cell, share = _run_cell(loop, setup.name, level, plan)
                after = read_counters(url)
                length = after.acceptance_length_since(before) if before and after else None
                yield CellResult(setup.name, number, cell, length, share)
        except REQUEST_ERRORS as error:
            raise server.failure(str(error)) from error


def _run_cell(loop: ClosedLoop, policy: str, level: int, plan: Plan) -> tuple[Cell, float]:
    """Measure a cell and this process's share of a CPU meanwhile."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    cell = asyncio.run(loop.run(policy, level, plan.warm_s, plan.measure_s))
    return cell, (time.process_time() - cpu_s) / (time.perf_counter() - wall_s)


def start_worker(stack: ExitStack, loop: str, config: Path, threads: int) -> Worker:
    """Start a reference loop and wait until it has loaded.

    Raises:
        BenchError: it ended instead.
    """
    arguments = [loop, "--config", str(config), "--threads", str(threads)]
    worker = stack.enter_context(Worker(WORKER_MODULE, *arguments))
    worker.wait_ready()
    return worker


def our_token_ids(prompts: Sequence[Prompt], config: Path) -> dict[str, list[int]]:
    """Prompt id -> token ids in the served chat template.

    Raises:
        BenchError: the reference worker failed.
    """
    with ExitStack() as stack:
        worker = start_worker(stack, "hf", config, 1)
        return {
            p.prompt_id: worker.ask({"messages": p.messages})["prompt_token_ids"] for p in prompts
        }


def _visit_loop(setup: Setup, plan: Plan, number: int) -> CellResult:
    """The package's loop at one stream, without HTTP: its worker times itself."""
    lengths: list[int] = []
    answers = []
    with ExitStack() as stack:
        worker = start_worker(stack, "dflash", plan.options.config, setup.num_threads)
        begin_s = time.perf_counter() + plan.warm_s
        end_s, now_s = begin_s + plan.measure_s, time.perf_counter()
        for prompt in cycle(plan.prompts):
            ids = plan.token_ids[prompt.prompt_id]
            reply = worker.ask({"prompt_token_ids": ids, "max_tokens": plan.max_tokens})
            start_s, now_s = now_s, time.perf_counter()
            num_tokens = len(reply["token_ids"])
            # No stream: its tokens are spread over its whole time, and no time to first token is known.
            answers.append(
                Answer(
                    *(start_s, start_s, now_s, num_tokens),
                    num_first=0,
                    num_cycles=len(reply["acceptance_lengths"]),
                    num_committed=sum(reply["acceptance_lengths"]),
                    prompt_id=prompt.prompt_id,
                    text=reply["text"],
                )
            )
            lengths += reply["acceptance_lengths"]
            if now_s >= end_s:
                break
    cell = Cell(setup.name, 1, begin_s, end_s, tuple(answers))
    return CellResult(setup.name, number, cell, acceptance_length(cell.answers), 0.0)


def say(result: CellResult) -> None:
    """Print a result while the run goes on, so that a broken run has not measured for nothing."""
    length = result.acceptance_length
    tau = "" if length is None else f", tau {length:.2f}"
    print(
        f"round {result.round + 1}: {result.row} at {result.cell.num_streams} streams: "
        f"{result.cell.tokens_per_s:.0f} tokens/s{tau}, client {result.client_share:.0%}",
        file=sys.stderr,
    )
