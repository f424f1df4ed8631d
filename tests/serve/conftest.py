"""One local Ray and one application for all tests of this folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

# A user's throughput settings bind Serve's handles to one event loop; these tests use several. Read by
# Ray when it is imported.
os.environ["RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"] = "1"

import pytest
import ray
from ray import serve

from loadtest.processes import free_port
from services.app import build
from services.config import AppArgs
from services.yaml_args import read_app_args

# Importlib mode puts no test folder on the path; helpers live beside their tests.
sys.path.insert(0, str(Path(__file__).parent))

from served_app import APP, ROOT, ServedApp, changed


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="session")
def app_args(tmp_path_factory: pytest.TempPathFactory) -> AppArgs:
    """As shipped, but nothing is measured at start (``test_block_scheduler`` does that), and calls are read
    although the model's template knows none: a grammar can have it make some."""
    costs = str(tmp_path_factory.mktemp("costs"))
    args = read_app_args(ROOT / "config.yaml")
    unmeasured = {"sweep_s": 0, "cost_folder": costs}
    return changed(args, block_scheduler=unmeasured, gateway={"tool_parser": "hermes"})


@pytest.fixture(scope="session")
def http_port(local_ray: None) -> int:
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    return port


@pytest.fixture(scope="session")
def served(http_port: int, app_args: AppArgs) -> Iterator[ServedApp]:
    serve.run(build(app_args), name=APP, route_prefix="/")
    yield ServedApp(app_args, f"http://127.0.0.1:{http_port}")
