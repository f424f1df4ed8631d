"""CPU time of processes below a process, by name, out of Linux's ``/proc``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")


def descendants(pid: int) -> list[int]:
    """Return ``pid`` and every process below it."""
    children: dict[int, list[int]] = {}
    for path in PROC.glob("[0-9]*/stat"):
        try:
            # The name in parentheses may hold spaces and parentheses itself.
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue  # it has just ended
        children.setdefault(parent, []).append(int(path.parent.name))
    return list(_below(pid, children))


def _below(pid: int, children: dict[int, list[int]]) -> Iterator[int]:
    yield pid
    for child in children.get(pid, ()):
        yield from _below(child, children)


def command(pid: int) -> str:
    """Return a process's command line, or nothing when it has ended."""
    try:
        return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
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
