"""Finds the processes of Ray's actors on this machine, to kill or to count them."""

from __future__ import annotations

import psutil


def actor_processes(class_name: str) -> list[psutil.Process]:
    """Worker processes of this Ray that host an actor of the class; Ray puts it into their title."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:  # it ended while we looked
            continue
        if title.startswith(f"ray::{class_name}"):
            found.append(process)
    return found
