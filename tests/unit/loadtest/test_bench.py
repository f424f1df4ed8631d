"""The benchmark against a scripted server and scripted reference workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from loadtest_fakes import FakeServer

from loadtest import bench
from loadtest.bench_rows import ApiClient, BenchPrompt, ServedRow
from loadtest.processes import BenchError, ChildProcess, Worker
from loadtest.prompt_sets import Prompt

pytestmark = pytest.mark.unit

WORKER = """
import json, sys
mode = sys.argv[1]
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if "messages" in request:
        reply = {"prompt_token_ids": [1, 2, 3]}
    elif request["max_tokens"] == 13:
        sys.exit("no luck today")
    else:
        lengths = [3, 2] if mode == "dflash" else None
        reply = {"token_ids": [7] * 6, "seconds": 100.0, "acceptance_lengths": lengths, "text": "42"}
    print(json.dumps(reply), flush=True)
"""


@pytest.fixture
def completion(fake_server: FakeServer) -> FakeServer:
    """The server answers every completion with six tokens in two cycles."""
    answer = {
        "choices": [{"text": "42", "finish_reason": "stop"}],
        "usage": {"completion_tokens": 6},
        "dflash": {
            "num_cycles": 2,
            "committed_per_cycle": [3, 2],
            "draft_ms": 1.0,
            "verify_ms": 4.0,
            "overhead_ms": 0.5,
        },
    }
    fake_server.reply = [json.dumps(answer).encode()]
    return fake_server


@pytest.fixture
def worker_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "scripted_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setattr(bench, "WORKER_MODULE", "scripted_worker")
    return "scripted_worker"


def test_a_whole_run(
    completion: FakeServer, worker_module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--num-prompts", "2", "--repeats", "2", "--max-tokens", "32"]
    options = bench.parse_arguments(["--base-url", completion.base_url, *arguments])
    assert bench.run(options) == 0

    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(document["rows"]) == [
        "off",
        "static:4",
        "static:8",
        "static:16",
        "transformers generate",
        "dflash package loop",
    ]
    assert document["rows"]["dflash package loop"]["acceptance_length"] == 2.5
    assert document["rows"]["transformers generate"]["identical_to_off"] is True
    assert document["rows"]["transformers generate"]["tokens_per_s"] == 0.06
    assert document["bars"][1]["met"] is True

    assert set(completion.paths) == {"/v1/completions"}
    warm_ups, measured = completion.bodies[:4], completion.bodies[4:]
    assert [body["max_tokens"] for body in warm_ups] == [bench.WARM_UP_TOKENS] * 4
    assert len(measured) == 2 * 2 * 4
    assert all(body["prompt"] == [1, 2, 3] and body["temperature"] == 0 for body in measured)
    first_of_prompt = [body["dflash"]["policy"] for body in measured[::4]]
    assert len(set(first_of_prompt)) > 1, "the order does not rotate"


def test_without_references_prompts_go_to_chat(completion: FakeServer) -> None:
    completion.reply = [
        completion.reply[0].replace(b'"text": "42"', b'"message": {"content": "42"}')
    ]
    options = bench.parse_arguments(
        ["--base-url", completion.base_url, "--no-references", "--num-prompts", "1", "--check"]
    )
    # All policies are equally fast here, so the bar of 2.0 is missed.
    assert bench.run(options) == 1
    assert set(completion.paths) == {"/v1/chat/completions"}
    assert completion.bodies[0]["messages"][0]["role"] == "user"


def test_an_http_error_is_told(completion: FakeServer) -> None:
    completion.status = 400
    row = ServedRow(ApiClient(completion.base_url), "demo", "static:99")
    prompt = BenchPrompt(Prompt("p", "chat", []), [1])
    with pytest.raises(BenchError, match=r"/v1/completions answered 400"):
        row.measure(prompt, 8, 0)


def test_no_server_says_how_to_start_one() -> None:
    with pytest.raises(BenchError, match="make serve"):
        bench.run(bench.parse_arguments(["--base-url", "http://127.0.0.1:9"]))


def test_a_second_server_is_refused(completion: FakeServer) -> None:
    with pytest.raises(BenchError, match="--base-url"):
        bench.run(bench.parse_arguments(["--start-url", completion.base_url]))


def test_off_must_be_among_the_policies(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse_arguments(["--policies", "static:8"])
    assert "'off'" in capsys.readouterr().err


def test_a_worker_that_ends_shows_its_last_words(worker_module: str) -> None:
    with Worker(worker_module, "hf") as worker:
        worker.wait_ready()
        with pytest.raises(BenchError, match="status 1\nno luck today"):
            worker.ask({"prompt_token_ids": [1], "max_tokens": 13})
    assert worker.process.returncode == 1


def test_a_child_is_stopped_as_by_ctrl_c() -> None:
    program = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(5))\n"
        "print('up', flush=True)\nsignal.pause()\n"
    )
    child = ChildProcess([sys.executable, "-c", program], has_pipes=True)
    assert child.process.stdout is not None
    assert child.process.stdout.readline() == "up\n"
    child.stop()
    child.stop()
    assert child.process.returncode == 5


def test_a_stubborn_child_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChildProcess, "stop_s", 0.05)
    program = (
        "import signal\n"
        "for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)\n"
        "print('up', flush=True)\nwhile True: signal.pause()\n"
    )
    child = ChildProcess([sys.executable, "-c", program], has_pipes=True)
    assert child.process.stdout is not None
    child.process.stdout.readline()
    child.stop()
    assert child.process.returncode == -signal.SIGKILL


def test_help_needs_nothing() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "loadtest.bench", "--help"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).resolve().parents[3],
    )
    assert "--no-references" in result.stdout
