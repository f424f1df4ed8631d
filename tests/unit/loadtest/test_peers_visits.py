"""Visits to a scripted server: ours, a peer's, and the loop without one."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from loadtest_fakes import FakeServer, frame

from loadtest.peers import visits
from loadtest.peers.setups import Setup
from loadtest.peers.visits import Plan, visit
from loadtest.processes import BenchError
from loadtest.prompt_sets import Prompt

pytestmark = pytest.mark.unit

PROMPTS = [Prompt("p0", "chat", [{"role": "user", "content": "q"}])]
STREAM = [
    frame({"choices": [{"delta": {"role": "assistant", "content": None}}]}),
    frame({"choices": [{"delta": {"content": "4"}, "finish_reason": None}]}),
    frame({"choices": [{"delta": {"content": "2"}, "finish_reason": "stop"}]}),
    frame({"choices": [], "usage": {"completion_tokens": 2}}),
    b"data: [DONE]\n\n",
]


def plan_for(server: FakeServer, **changes: Any) -> Plan:
    values: dict[str, Any] = {
        "prompts": PROMPTS,
        "token_ids": {"p0": [1, 2]},
        "levels": [1, 2],
        "policies": ["off", "static:4"],
        "warm_s": 0.0,
        "measure_s": 0.05,
        "max_tokens": 4,
        "port": int(server.base_url.rpartition(":")[2]),
        "start_timeout_s": 30.0,
        "options": Namespace(base_url=server.base_url, config=Path("config.yaml")),
    }
    return Plan(**{**values, **changes})


def sleeper(code: str = "import signal; signal.pause()") -> Setup:
    return Setup("vllm/float32/plain", "vllm", [sys.executable, "-c", code])


def test_ours_is_measured_with_every_policy_at_every_level(fake_server: FakeServer) -> None:
    fake_server.reply = STREAM
    results = list(visit(Setup("ours", "ours"), plan_for(fake_server), 1))
    assert [(r.row, r.cell.num_streams, r.round) for r in results] == [
        *(("ours/static:4", 1, 1), ("ours/off", 1, 1)),
        *(("ours/static:4", 2, 1), ("ours/off", 2, 1)),
    ]
    assert results[0].cell.answers[0].text == "42"
    assert {body["dflash"]["policy"] for body in fake_server.bodies} == {"off", "static:4"}


def test_a_peer_is_asked_nothing_that_only_we_know(
    fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []
    monkeypatch.setattr(visits, "check_tokens", lambda *arguments: compared.append(arguments))
    fake_server.reply = STREAM
    results = list(visit(sleeper(), plan_for(fake_server), 0))
    assert [(r.row, r.cell.num_streams) for r in results] == [
        ("vllm/float32/plain", 1),
        ("vllm/float32/plain", 2),
    ]
    assert results[0].acceptance_length is None
    assert [arguments[1] for arguments in compared] == ["vllm"]
    assert not any("dflash" in body or "cache_salt" in body for body in fake_server.bodies)


def test_a_peer_with_other_tokens_is_not_measured(fake_server: FakeServer) -> None:
    fake_server.reply = [b'{"tokens": [1, 3]}']
    with pytest.raises(BenchError, match="encodes p0 differently from token 1 on"):
        list(visit(sleeper(), plan_for(fake_server), 0))
    assert set(fake_server.paths) == {"/tokenize"}


def test_a_peer_that_does_not_start(fake_server: FakeServer) -> None:
    fake_server.base_url = "http://127.0.0.1:9"
    setup = sleeper("import sys; sys.exit('unknown architecture')")
    with pytest.raises(BenchError, match=r"status 1 at start\nunknown architecture"):
        list(visit(setup, plan_for(fake_server), 0))


class FakeWorker:
    """Answers as the reference loop does."""

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert request == {"prompt_token_ids": [1, 2], "max_tokens": 4}
        return {"token_ids": [7, 8, 9], "text": "abc", "acceptance_lengths": [1, 2]}


def test_the_loop_is_measured_at_one_stream_only(
    fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def start(_stack: object, *arguments: object) -> FakeWorker:
        started.append(arguments)
        return FakeWorker()

    monkeypatch.setattr(visits, "start_worker", start)
    setup = Setup("dflash/float32/threads:2", "dflash", num_threads=2)
    (result,) = visit(setup, plan_for(fake_server, measure_s=0.02), 0)
    assert (result.cell.num_streams, result.acceptance_length) == (1, 1.5)
    assert started == [("dflash", Path("config.yaml"), 2)]
    assert result.cell.answers[0].num_first == 0
    assert result.cell.tokens_per_s > 0
    assert list(visit(setup, plan_for(fake_server, levels=[4]), 0)) == []
