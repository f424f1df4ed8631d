"""Chrome trace events of recorded steps and chunks: open the file in Perfetto or chrome://tracing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from dflash_wire.records import StepRecord

RECORDED_CHUNKS = 8192
COORDINATOR, DRAFTER, VERIFIER = 1, 2, 3
THREAD_NAMES = {COORDINATOR: "coordinator", DRAFTER: "drafter", VERIFIER: "verifier"}
GATEWAY_PROCESS = 1000


class ChunkRecord(NamedTuple):
    """One chunk's way through the gateway; times in seconds of the machine's monotonic clock."""

    request_id: str
    num_tokens: int
    taken_s: float
    """Taken from the engine's stream."""
    written_s: float
    """Text made and handed to the connection."""


class ChunkRecorder:
    """The records of the latest chunks. Owner: the gateway's event loop."""

    def __init__(self, most_chunks: int = RECORDED_CHUNKS) -> None:
        self.records: deque[ChunkRecord] = deque(maxlen=most_chunks)
        self.clock = time.perf_counter

    def add(self, request_id: str, num_tokens: int, taken_s: float) -> None:
        """Add a chunk that has just been written; the oldest one goes. Mutates."""
        self.records.append(ChunkRecord(request_id, num_tokens, taken_s, self.clock()))


def chrome_trace(
    groups: Sequence[Sequence[StepRecord]], chunks: Iterable[ChunkRecord]
) -> dict[str, Any]:
    """Return a trace in Chrome's JSON format.

    Args:
        groups: the steps of each engine group.
        chunks: of one gateway.
    """
    events: list[dict[str, Any]] = []
    for index, records in enumerate(groups):
        events += _group_events(index, records)
    events += _gateway_events(chunks)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _group_events(index: int, records: Sequence[StepRecord]) -> list[dict[str, Any]]:
    process = index + 1
    events = [_name("process_name", process, 0, f"engine group {index}")]
    events += [_name("thread_name", process, t, name) for t, name in THREAD_NAMES.items()]
    for record in records:
        step = f"step {record.step_id}"
        facts = {
            "step": record.step_id,
            "cohorts": record.num_cohorts,
            "rows": record.num_rows,
            "positions": record.num_positions,
            "prefill positions": record.num_prefill_positions,
            "tokens": record.num_committed,
        }
        events.append(_slice(process, COORDINATOR, "plan", record.planning_s, record.sent_s, facts))
        if record.draft_began_s:
            drafted_s = record.draft_began_s + record.draft_ms / 1e3
            events.append(_slice(process, DRAFTER, step, record.draft_began_s, drafted_s, facts))
        verified_s = record.verify_began_s + record.verify_ms / 1e3
        events.append(_slice(process, VERIFIER, step, record.verify_began_s, verified_s, facts))
        events.append(
            _slice(process, COORDINATOR, "commit", record.landed_s, record.published_s, facts)
        )
    return events


def _gateway_events(chunks: Iterable[ChunkRecord]) -> list[dict[str, Any]]:
    events = [_name("process_name", GATEWAY_PROCESS, 0, "gateway")]
    threads: dict[str, int] = {}
    for chunk in chunks:
        thread = threads.get(chunk.request_id)
        if thread is None:
            thread = threads[chunk.request_id] = len(threads) + 1
            events.append(_name("thread_name", GATEWAY_PROCESS, thread, chunk.request_id))
        facts = {"request": chunk.request_id, "tokens": chunk.num_tokens}
        events.append(
            _slice(GATEWAY_PROCESS, thread, "chunk", chunk.taken_s, chunk.written_s, facts)
        )
    return events


def _slice(
    process: int, thread: int, name: str, began_s: float, ended_s: float, facts: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "name": name,
        "ts": round(1e6 * began_s, 1),
        "dur": round(1e6 * max(0.0, ended_s - began_s), 1),
        "args": facts,
    }


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}
