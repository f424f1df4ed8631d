"""The command-line tools against the started server and the shipped pair."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from started_server import ROOT, StartedServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.filterwarnings("default")]


def test_locust_user_measures_the_server(server: StartedServer, tmp_path: Path) -> None:
    run = subprocess.run(
        [
            *(sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless"),
            *("--host", server.base_url, "--users", "2", "--spawn-rate", "2"),
            *("--run-time", "8s", "--csv", str(tmp_path / "stats"), "--only-summary"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    table = (tmp_path / "stats_stats.csv").read_text()
    for name in ("TTFT", "TPOT", "E2E"):
        assert name in table


def test_offline_answers_and_resumes(tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    rows = [{"id": f"q{i}", "question": f"Ann has {i} pens. How many pens?"} for i in range(6)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config, costs = tmp_path / "config.yaml", tmp_path / "costs"
    shipped = yaml.safe_load((ROOT / "config.yaml").read_text())
    shipped["applications"][0]["args"]["block_scheduler"]["cost_folder"] = str(costs)
    config.write_text(yaml.safe_dump(shipped))
    command = [
        *(sys.executable, "-m", "services.offline", "--prompts", str(prompts)),
        *("--output", str(output), "--max-tokens", "16", "--config", str(config)),
    ]
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "6 answered" in first.stderr
    assert "steps measured in" in first.stderr, "the shipped policy wants to know what steps cost"
    answers = output.read_text().splitlines()
    # As if the run had been killed in the middle of a line: two whole answers are left.
    output.write_text("\n".join([*answers[:2], answers[2][:20]]))
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "4 answered" in second.stderr
    assert "samples out of" in second.stderr and "measured" not in second.stderr
    resumed = [json.loads(line) for line in output.read_text().splitlines()]
    assert sorted(row["id"] for row in resumed) == [f"q{i}" for i in range(6)]
    texts = {row["id"]: row["text"] for row in map(json.loads, answers)}
    assert {row["id"]: row["text"] for row in resumed} == texts
