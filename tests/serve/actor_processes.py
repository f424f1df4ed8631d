"""Finds the processes of Ray's actors on this machine, to kill or to count them."""

from __future__ import annotations

import time

import psutil
import ray

ENDED_WITHIN_S = 120


def actor_processes(class_name: str) -> list[psutil.Process]:
    """Worker processes of this Ray that host an actor of the class; Ray puts it into their title.

    Another Ray under this process, of a server that some test has started, does not count.
    """
    session = ray.get_runtime_context().get_session_name()
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
            parent = process.parent()
            is_ours = parent is not None and session in " ".join(parent.cmdline())
        except psutil.Error:  # it ended while we looked
            continue
        if title.startswith(f"ray::{class_name}") and is_ours:
            found.append(process)
    return found


def only_actor_process(class_name: str) -> psutil.Process:
    """The one process that is left when those of ended applications and replaced actors are gone.

    Serve forgets a replica before Ray has ended the actors that it owned.
    """
    deadline = time.monotonic() + ENDED_WITHIN_S
    while True:
        found = actor_processes(class_name)
        if len(found) == 1:
            return found[0]
        ages = {process.pid: f"{time.time() - process.create_time():.0f} s" for process in found}
        assert time.monotonic() < deadline, f"not one {class_name} but {ages}"
        psutil.wait_procs(found, timeout=0.5)
