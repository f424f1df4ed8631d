"""What the soak watches from outside: the server's metrics, and the memory of its processes."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from urllib.request import urlopen

import psutil
from prometheus_client.parser import text_string_to_metric_families

from loadtest.processes import BenchError

BUSY = (
    "dflash_requests_running",
    "dflash_sequences_running",
    "dflash_sequences_waiting",
    "dflash_pages_in_use",
)
"""Gauges that are zero when nothing is going on."""
POLL_S = 0.5
_ACTOR_TITLE = re.compile(r"ray::([A-Za-z0-9_:]+)")


class MetricsReader:
    """Reads ``/metrics``, every series of a name added up."""

    def __init__(self, base_url: str) -> None:
        self._url = f"{base_url}/metrics"

    def read(self) -> dict[str, float]:
        """Return the sums by sample name.

        Raises:
            BenchError: no answer.
        """
        try:
            with urlopen(self._url, timeout=30) as response:
                text = response.read().decode()
        except OSError as error:
            raise BenchError(f"{self._url}: {error}") from error
        sums: dict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] += sample.value
        return dict(sums)

    def wait_idle(self, timeout_s: float) -> dict[str, float]:
        """Return the metrics once nothing is busy, or as they are when the time is over.

        Raises:
            BenchError: no answer, or the server reports no engine group.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            now = self.read()
            if now.get("dflash_pages", 0) == 0:
                if time.monotonic() > deadline:
                    raise BenchError("the server reports no engine group")
            elif all(now[name] == 0 for name in BUSY) or time.monotonic() > deadline:
                return now
            time.sleep(POLL_S)


class MemoryWatch:
    """Memory of a server's processes, by what they are.

    Args:
        root_pid: the process that started the server, or one above it.

    Shared pages count by share (PSS) where the system tells, else each process counts them fully (RSS).
    """

    def __init__(self, root_pid: int) -> None:
        self._family = {psutil.Process(root_pid)}
        # Ray's processes leave their parent later on: whoever has been seen stays in the family.
        self.note_family()
        self._family.discard(psutil.Process())

    def note_family(self) -> None:
        """Remember all processes below those that are known."""
        for process in list(self._family):
            try:
                self._family |= set(process.children(recursive=True))
            except psutil.Error:
                self._family.discard(process)

    def read(self) -> dict[str, float]:
        """Return MiB by role; roles with several processes are added up."""
        self.note_family()
        memory: dict[str, float] = defaultdict(float)
        for process in self._family - {psutil.Process()}:
            try:
                info = process.memory_full_info()
                role = role_of(process.cmdline(), process.name())
            except psutil.Error:  # it has just ended
                continue
            memory[role] += getattr(info, "pss", info.rss) / 2**20
        return dict(memory)


def role_of(command: list[str], name: str) -> str:
    """Return what a process is: an actor's class, or the program that runs."""
    match = _ACTOR_TITLE.match(" ".join(command))
    if match:
        return match[1].removeprefix("ServeReplica:").removeprefix("dflash:")
    if name.startswith("ray-dashboard"):
        return "ray-dashboard"
    if name.startswith("python") and len(command) > 1 and "-c" not in command:
        script = next((word for word in command[1:] if not word.startswith("-")), name)
        return script.rsplit("/", 1)[-1]
    return name
