"""Starts and stops ``serve run`` on a free port, and finds what it leaves behind."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil
import yaml

from loadtest.processes import free_port

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 180
STOP_TIMEOUT_S = 60
COSTS = Path(tempfile.mkdtemp(prefix="dflash-costs-"))
"""For all servers of a test run: the first one measures."""
atexit.register(shutil.rmtree, COSTS, ignore_errors=True)


def feature_segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("dflash-*")}


def _take_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class StartedServer:
    """One run of the shipped ``config.yaml``; only ports differ, where costs are kept, and for how long they
    may be measured; and gRPC is on.

    Args:
        folder: for the config and the log.
        has_haproxy: serve as ``make serve HAPROXY=1`` does; else through Serve's Python proxy.
    """

    def __init__(self, folder: Path, has_haproxy: bool = False) -> None:
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.segments_before = feature_segments()
        config = yaml.safe_load((ROOT / "config.yaml").read_text())
        config["http_options"]["port"] = self.port
        self.grpc_port = free_port()
        grpc_options = yaml.safe_load((ROOT / "configs" / "grpc.yaml").read_text())["grpc_options"]
        config["grpc_options"] = {**grpc_options, "port": self.grpc_port}
        (application,) = config["applications"]
        # A busy machine may take longer than a user should wait; what is not all measured is not kept.
        application["args"]["block_scheduler"] |= {"cost_folder": str(COSTS), "sweep_s": 120}
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        self.log_path = folder / "server.log"
        self.startup_log = ""
        # RAY_ADDRESS=local: never join a cluster that happens to run on this machine.
        environment = {
            **os.environ,
            "RAY_ADDRESS": "local",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_SERVE_ENABLE_HA_PROXY": str(int(has_haproxy)),
            "RAY_SERVE_THROUGHPUT_OPTIMIZED": str(int(has_haproxy)),
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
            "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        }
        self.started_at = time.monotonic()
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [str(Path(sys.executable).parent / "serve"), "run", str(path)],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # A runner in the background ignores SIGINT, and children inherit that.
                preexec_fn=_take_interrupts,
            )
        self.family: set[psutil.Process] = set()

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"serve run ended:\n{self.log_path.read_text()[-4000:]}")
            try:
                if httpx.get(f"{self.base_url}/ready", timeout=10).status_code == 200:
                    self.note_family()
                    self.startup_log = self.log_path.read_text()
                    return
            except httpx.TransportError:
                time.sleep(0.3)  # nothing listens yet: there is nothing to wait on but time
        raise RuntimeError(
            f"not ready in {START_TIMEOUT_S} s:\n{self.log_path.read_text()[-4000:]}"
        )

    def note_family(self) -> None:
        """Remember all processes below the server; Ray's daemonize themselves, so keep them."""
        self.family |= set(psutil.Process(self.process.pid).children(recursive=True))

    def stop(self) -> None:
        """Press Ctrl-C and wait."""
        if self.process.poll() is None:
            self.note_family()
            os.kill(self.process.pid, signal.SIGINT)
            self.process.wait(STOP_TIMEOUT_S)
        psutil.wait_procs(list(self.family), timeout=STOP_TIMEOUT_S)

    def survivors(self) -> list[str]:
        """Command lines of processes of this server that still run."""
        return [
            " ".join(p.cmdline())[:120]
            for p in self.family
            if p.is_running() and p.status() != psutil.STATUS_ZOMBIE
        ]
