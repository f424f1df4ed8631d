"""What the soak watches from outside: the memory of the server's processes."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import psutil

_ACTOR_TITLE = re.compile(r"ray::([A-Za-z0-9_:]+)")


class MemoryWatch:
    """Memory of a server's processes, by what they are.

    Args:
        root_pid: the process that started the server, or one above it.

    Shared pages count by share (PSS) where the system tells, else each process counts them fully (RSS). Of
    files, what a process had when it was first read goes on counting: its share of a library grows when other
    programs that use it end.
    """

    def __init__(self, root_pid: int) -> None:
        self._family = {psutil.Process(root_pid)}
        # Ray's processes leave their parent later on: whoever has been seen stays in the family.
        self.note_family()
        self._family.discard(psutil.Process())
        self._file_bytes: dict[psutil.Process, int] = {}

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
                role = role_of(process.cmdline(), process.name())
                memory[role] += self._bytes(process) / 2**20
            except psutil.Error:  # it has just ended
                continue
        return dict(memory)

    def _bytes(self, process: psutil.Process) -> int:
        """Return what a process holds.

        Raises:
            psutil.Error: it has ended.
        """
        try:
            told = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii")
        except OSError:
            told = ""
        found = dict(re.findall(r"^Pss_(Anon|Shmem|File): +(\d+) kB$", told, re.MULTILINE))
        if not found:
            return int(process.memory_info().rss)
        of_files = self._file_bytes.setdefault(process, 1024 * int(found["File"]))
        return of_files + 1024 * (int(found["Anon"]) + int(found["Shmem"]))


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
