"""Processes below a process, and their CPU time: Linux's own, which is finer than psutil's."""

from __future__ import annotations

from pathlib import Path

import psutil

PROC = Path("/proc")


def descendants(pid: int) -> list[int]:
    """Return ``pid`` and every process below it; nothing when it has ended."""
    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def command(pid: int) -> str:
    """Return a process's command line, or nothing when it has ended."""
    try:
        return " ".join(psutil.Process(pid).cmdline()).strip()
    except psutil.Error:
        return ""


def cpu_s(pid: int) -> float:
    """Return the seconds that a process's threads have run, to the nanosecond; 0 when it has ended."""
    nanoseconds = 0
    for path in (PROC / str(pid) / "task").glob("*/schedstat"):
        try:
            nanoseconds += int(path.read_text().split()[0])
        except OSError:
            continue
    return nanoseconds * 1e-9
