"""The Locust file in its own process, since Locust patches the standard library on import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from loadtest_fakes import FakeServer, frame

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]


ROLE = frame({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
FIRST = frame({"choices": [{"delta": {"content": "4"}, "finish_reason": None}]})
LAST = frame(
    {
        "choices": [{"delta": {"content": "2 apples"}, "finish_reason": "stop"}],
        "dflash": {"committed_per_cycle": [5], "acceptance_length": 5.0},
    }
)
USAGE = frame({"choices": [], "usage": {"completion_tokens": 6}})
DONE = b"data: [DONE]\n\n"


def run_locust(base_url: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless"]
    command += ["--host", base_url, "--users", "2", "--spawn-rate", "10", "--only-summary"]
    return subprocess.run(
        [*command, "--run-time", "60s", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "default"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_run_reports_its_metrics(fake_server: FakeServer, tmp_path: Path) -> None:
    fake_server.reply = [ROLE, FIRST, LAST, USAGE, DONE]
    rows_file = tmp_path / "rows.jsonl"
    options = ("--policy", "static:8", "--max-tokens", "7", "--temperature", "0.5")
    result = run_locust(
        fake_server.base_url, *options, "--requests", "5", "--rows-file", str(rows_file)
    )
    assert result.returncode == 0, result.stderr

    summary = json.loads(result.stdout.strip().splitlines()[-1])
    assert (summary["num_requests"], summary["num_failures"]) == (5, 0)
    assert summary["completion_tokens"] == 30
    assert summary["acceptance_length"]["p50"] == 5.0
    for name in ("TTFT", "TPOT", "E2E", "TOKENS_PER_S"):
        assert name in result.stderr + result.stdout

    assert len(fake_server.bodies) == 5
    body = fake_server.bodies[0]
    assert body["model"] == "demo"
    assert (body["max_tokens"], body["temperature"]) == (7, 0.5)
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
    assert body["dflash"] == {"stats": True, "policy": "static:8"}
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    assert [row["tokens_in_first_chunk"] for row in rows] == [1] * 5


@pytest.mark.parametrize(
    ("status", "reply", "message"),
    [
        (
            200,
            [ROLE, FIRST, frame({"error": {"code": "engine_failed", "message": "gone"}})],
            "gone",
        ),
        (200, [ROLE, FIRST, LAST, USAGE], "without [DONE]"),
        (429, [b'{"error": {"message": "queue is full"}}'], "HTTP 429"),
    ],
    ids=["error-event", "no-done", "http-error"],
)
def test_a_bad_answer_is_a_failure(
    fake_server: FakeServer, status: int, reply: list[bytes], message: str
) -> None:
    fake_server.status, fake_server.reply = status, reply
    result = run_locust(fake_server.base_url, "--requests", "2")
    assert result.returncode == 1
    assert message in result.stderr + result.stdout
    assert "run-time limit reached" not in result.stderr
    assert json.loads(result.stdout.strip().splitlines()[-1])["num_failures"] == 2


def test_a_server_without_a_model_ends_the_run() -> None:
    result = run_locust("http://127.0.0.1:9", "--requests", "1")
    assert result.returncode == 1
    assert "No model found at http://127.0.0.1:9/v1/models" in result.stderr
    assert "run-time limit reached" not in result.stderr


def test_an_unknown_prompt_set_ends_the_run() -> None:
    result = run_locust("http://127.0.0.1:9", "--prompt-set", "poems")
    assert result.returncode != 0
    assert "unknown prompt set 'poems'" in result.stderr
