"""Clients of other languages and frameworks, as far as ``make test-clients`` has installed them here."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from scripted_gateway import scripted_gateway
from started_server import ROOT, StartedServer

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("default")]

PROGRAMS = ROOT / "tests" / "clients"
PYTHON = ROOT / "build" / "clients" / "bin" / "python"
OLDEST_NODE = 20
COMPLY = (
    "chat-basic-response",
    "chat-system-prompt",
    "chat-multi-turn",
    "chat-streaming-response",
    "chat-streaming-usage",
    "chat-error-handling",
)
TIMEOUT_S = 240


@pytest.fixture(scope="module")
def environment(server: StartedServer) -> Iterator[dict[str, str]]:
    model = httpx.get(f"{server.base_url}/v1/models").json()["data"][0]["id"]
    with scripted_gateway() as scripted:
        yield {
            **os.environ,
            "DFLASH_URL": server.base_url,
            "DFLASH_MODEL": model,
            "DFLASH_SCRIPTED_URL": scripted,
        }


def node() -> str:
    """Return the program, or skip with what is missing."""
    found = shutil.which("node")
    if found is None:
        pytest.skip("no node on this machine")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True)
    if int(version.stdout.removeprefix("v").split(".")[0]) < OLDEST_NODE:
        pytest.skip(f"node {version.stdout.strip()} is older than {OLDEST_NODE}")
    if not (PROGRAMS / "node_modules").is_dir():
        pytest.skip("npm packages are not installed: make test-clients")
    return found


def run(command: list[str | Path], environment: dict[str, str]) -> str:
    done = subprocess.run(
        command,
        cwd=PROGRAMS,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.mark.parametrize(
    ("program", "num_tests"), [("openai.test.mjs", 12), ("ai_sdk.test.mjs", 7)]
)
def test_javascript(program: str, num_tests: int, environment: dict[str, str]) -> None:
    output = run([node(), "--test", "--test-reporter=tap", program], environment)
    (passed,) = re.findall(r"^# pass (\d+)$", output, re.MULTILINE)
    assert int(passed) >= num_tests


def python() -> Path:
    """Return the other environment's interpreter, or skip."""
    if not PYTHON.exists():
        pytest.skip("build/clients is not there: make test-clients")
    return PYTHON


def test_langchain(environment: dict[str, str]) -> None:
    output = run([python(), "-m", "unittest", "-v", "langchain_client"], environment)
    assert "Ran 8 tests" in output


def test_llm_comply(environment: dict[str, str]) -> None:
    """What it asks of chat, less images and forced calls. It wants answers that end by themselves, which the
    scripted model's do and the embedded one's often do not."""
    output = run(
        [
            *(python(), "-m", "llm_comply.cli", "--format", "openai-chat", "--json"),
            *("-u", f"{environment['DFLASH_SCRIPTED_URL']}/v1", "-k", "none"),
            *("-m", "demo/model", "-f", ",".join(COMPLY)),
        ],
        environment,
    )
    results = json.loads(output[output.index("{") :])["results"]
    assert {result["id"]: result["status"] for result in results} == dict.fromkeys(COMPLY, "passed")
