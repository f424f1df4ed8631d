"""A benchmark that is ended ends its children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.processes import ROOT

pytestmark = pytest.mark.unit

PARENT = """
import sys
from loadtest.processes import ChildProcess, accept_interrupts

accept_interrupts()
child = "import os, signal; print(os.environ['WORD'], flush=True); signal.pause()"
with ChildProcess([sys.executable, "-c", child], True, {"WORD": "here"}) as process:
    print(process.process.stdout.readline().strip(), process.process.pid, flush=True)
    process.process.wait()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_children_too(number: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    ) as parent:
        assert parent.stdout is not None
        word, child = parent.stdout.readline().split()
        assert word == b"here", "the child has its own variables"
        parent.send_signal(number)
        parent.wait(60)
    with pytest.raises(ProcessLookupError):
        os.kill(int(child), 0)
