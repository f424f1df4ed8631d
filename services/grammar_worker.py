"""A process that tries grammars out, so that one that cannot be borne costs a process and not a server.

Answers each frame (``grammar_wire``) with one that says what is wrong with the grammar in it, empty if
nothing is. The first answer comes unasked, when it can be asked.

A grammar that takes too much CPU time or memory ends the process: nothing else stops xgrammar.
"""

from __future__ import annotations

import resource
import signal
import statistics
import sys
import time

import numpy as np

from dflash_wire.errors import InvalidRequestError
from services.grammar_wire import read_frame, write_frame
from verifier.grammars import GrammarPool, load_vocabulary
from verifier.matching import GrammarMatch

MOST_CPU_S = 5.0
"""For one grammar."""
MOST_MEMORY = 1024 * 1024 * 1024
"""Bytes beyond what the process has when it begins."""
MOST_COMPILED = 64 * 1024 * 1024
"""Bytes of one compiled grammar."""
NUM_WALKS, NUM_TOKENS = 2, 256
"""Outputs that are tried, and how long they are at most."""
MOST_STEP_S = 0.02
"""CPU time for one token of them."""
MOST_GROWTH, FREE_STEP_S = 2.0, 0.001
"""How much more the last quarter of such an output may cost than the second, if a token costs more than that:
where texts can be read in many ways, each token costs more than the one before."""


def problem_of(text: str, pool: GrammarPool, vocab_size: int) -> str:
    """Return what is wrong with a grammar; empty if nothing is."""
    try:
        compiled = pool.compile(text)
    except InvalidRequestError as error:
        return error.message
    if compiled.memory_size_bytes > MOST_COMPILED:
        return "it is too large; make it simpler"
    ends = pool.end_token_ids
    if GrammarMatch(compiled, vocab_size, ends).is_stuck:
        return "there is no text that it describes"
    for seed in range(NUM_WALKS):
        match = GrammarMatch(compiled, vocab_size, ends)
        if is_slow(step_times(match, ends, np.random.default_rng(seed))):
            return "it takes too long to follow; make it simpler or less ambiguous"
    return ""


def step_times(
    match: GrammarMatch, end_token_ids: tuple[int, ...], rng: np.random.Generator
) -> list[float]:
    """Return the CPU time in seconds of each token of a random output, up to one that is too slow."""
    times: list[float] = []
    while len(times) < NUM_TOKENS and (not times or times[-1] <= MOST_STEP_S):
        began = time.process_time()
        legal = match.walk((), ()).legal[0].numpy().nonzero()[0]
        going_on = legal[~np.isin(legal, end_token_ids)]
        if not len(going_on):
            break
        match.advance([int(rng.choice(going_on))])
        times.append(time.process_time() - began)
    return times


def is_slow(times: list[float]) -> bool:
    """Whether an output of any length would take too long."""
    if not times or times[-1] > MOST_STEP_S:
        return bool(times)
    quarter = NUM_TOKENS // 4
    before, behind = times[quarter : 2 * quarter], times[3 * quarter :]
    if len(behind) < quarter // 2:
        return False  # it ends by itself
    now = statistics.median(behind)
    return now > FREE_STEP_S and now > MOST_GROWTH * statistics.median(before)


def limit_memory() -> None:
    """Let no grammar take more than ``MOST_MEMORY``, where the system can say how much there is."""
    try:
        with open("/proc/self/statm", encoding="ascii") as sizes:
            used = int(sizes.read().split()[0]) * resource.getpagesize()
    except OSError:
        return
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_MEMORY, most))


def serve(path: str, vocab_size: int, end_token_ids: tuple[int, ...]) -> None:
    """Answer until the input ends."""
    info = load_vocabulary(path, vocab_size, end_token_ids)
    pool = GrammarPool(lambda: info, most_bytes=1)
    answers = sys.stdout.buffer
    sys.stdout = sys.stderr  # what libraries print is no answer
    limit_memory()
    write_frame(answers, b"")
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)  # at its end the process ends
        problem = problem_of(frame.decode(), pool, vocab_size)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(answers, problem.encode())


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), tuple(map(int, sys.argv[3:])))
