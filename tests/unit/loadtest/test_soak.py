from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter

import aiohttp
import pytest
from loadtest_fakes import FakeServer, frame

from loadtest import prompt_sets
from loadtest.metrics_reader import MetricsReader
from loadtest.soak import parse_arguments
from loadtest.soak_clients import FAILED, LEFT, OK, OVERLOADED, REFUSED, Clients, Tally
from loadtest.soak_report import SoakReport, render
from loadtest.soak_traffic import CHAT, COMPLETION, POLICIES, WRONG, Draw, Traffic
from loadtest.soak_watch import MemoryWatch, role_of


def traffic(seed: int = 0) -> Traffic:
    return Traffic("demo", prompt_sets.load("mixed"), seed)


# ----- traffic ----------------------------------------------------------------------------------


def test_everything_is_drawn() -> None:
    source = traffic()
    draws = [source.draw() for _ in range(3000)]
    kinds = Counter(draw.kind for draw in draws)
    assert set(kinds) == {
        "chat stream",
        "chat whole",
        "text stream",
        "text whole",
        "wrong",
        "canary",
        "look",
    }
    bodies = [draw.body for draw in draws if isinstance(draw.body, dict) and draw.kind != "wrong"]
    policies = {(body.get("dflash") or {}).get("policy") for body in bodies}
    assert policies == set(POLICIES)
    assert {body["temperature"] for body in bodies} == {0.0, 0.3, 0.8, 1.2}
    assert any(draw.leave_after_events == 0 for draw in draws)
    assert any(draw.leave_after_s for draw in draws)
    assert {(draw.path, draw.status) for draw in draws if draw.kind == "wrong"} == {
        (path, status) for path, _, status in WRONG
    }


def test_a_seed_replays_the_order() -> None:
    one, two, other = traffic(1), traffic(1), traffic(2)
    draws = [source.draw() for _ in range(50) for source in (one, two, other)]
    assert draws[0::3] == draws[1::3] != draws[2::3]


def test_a_canary_is_the_same_request_but_for_what_must_not_matter() -> None:
    source = traffic()
    seen: dict[str, str] = {}
    variants = set()
    for draw in (source.draw() for _ in range(3000)):
        if draw.canary is not None:
            assert isinstance(draw.body, dict)
            fixed = {
                k: v
                for k, v in draw.body.items()
                if k not in ("dflash", "stream", "priority", "cache_salt")
            }
            assert seen.setdefault(draw.canary, json.dumps(fixed)) == json.dumps(fixed)
            variants.add(json.dumps(draw.body))
    assert len(seen) > 8 and len(variants) > 5 * len(seen)


# ----- clients ----------------------------------------------------------------------------------


def send(server: FakeServer, draw: Draw, tally: Tally | None = None) -> Tally:
    tally = tally or Tally()

    async def scenario() -> None:
        async with aiohttp.ClientSession() as session:
            await Clients(server.base_url, traffic(), tally).send(session, draw)

    asyncio.run(scenario())
    return tally


def chat_event(text: str, reason: str | None = None) -> bytes:
    return frame({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}]})


STREAM = Draw("chat stream", CHAT, {"stream": True})
WHOLE = Draw("text whole", COMPLETION, {"stream": False})
DONE_FRAME = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        ([chat_event("a"), chat_event("b", "stop"), DONE_FRAME], OK),
        ([chat_event("a"), DONE_FRAME], FAILED),
        ([chat_event("a", "stop")], FAILED),
        ([chat_event("a"), b"event: error\n" + frame({"error": {"message": "lost"}})], FAILED),
        ([b"data: {broken\n\n"], FAILED),
    ],
)
def test_streams_must_end_well(fake_server: FakeServer, reply: list[bytes], outcome: str) -> None:
    fake_server.reply = reply
    assert send(fake_server, STREAM).outcomes == {("chat stream", outcome): 1}


def test_leaving_in_the_middle_is_no_failure(fake_server: FakeServer) -> None:
    fake_server.reply = [chat_event("a"), chat_event("b")]  # it would fail if read to its end
    for events in (0, 1, 2):
        draw = Draw("chat stream", CHAT, {"stream": True}, leave_after_events=events)
        assert send(fake_server, draw).num(LEFT) == 1


def test_wrong_requests_must_be_refused(fake_server: FakeServer) -> None:
    draw = Draw("wrong", CHAT, b"{", status=400)
    fake_server.headers["Content-Type"] = "application/json"
    fake_server.status, fake_server.reply = 400, [b'{"error": {"message": "no JSON"}}']
    assert send(fake_server, draw).num(REFUSED) == 1
    fake_server.status = 200
    assert send(fake_server, draw).num(FAILED) == 1
    fake_server.status = 500
    assert send(fake_server, WHOLE).num(FAILED) == 1


def test_overload_must_say_when_to_come_back(fake_server: FakeServer) -> None:
    fake_server.status, fake_server.reply = 429, [b"{}"]
    assert send(fake_server, WHOLE).num(FAILED) == 1
    fake_server.headers["Retry-After"] = "1"
    assert send(fake_server, WHOLE).num(OVERLOADED) == 1


def test_a_canary_with_another_text_is_a_failure(fake_server: FakeServer) -> None:
    draw, tally = Draw("canary", CHAT, {"stream": True}, canary="3"), Tally()
    for text in ("same", "same", "other"):
        fake_server.reply = [chat_event(text, "length"), DONE_FRAME]
        send(fake_server, draw, tally)
    assert (tally.num(OK), tally.num(FAILED)) == (2, 1)
    assert (tally.num_canary_answers, tally.num_canary_mismatches) == (3, 1)
    assert "'other'" in tally.failures[0]


# ----- watching and judging ---------------------------------------------------------------------


def test_series_of_one_name_are_added_up(fake_server: FakeServer) -> None:
    fake_server.text = 'dflash_pages{group="a"} 5\ndflash_pages{group="b"} 7\n'
    assert MetricsReader(fake_server.base_url).read()["dflash_pages"] == 12


def test_memory_of_children_is_seen_and_forgotten_when_they_end() -> None:
    program = "data = b'x' * 2**25; print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None and child.stdout.readline()
        memory = MemoryWatch(os.getpid())
        assert sum(memory.read().values()) > 32
        child.communicate(b"\n")
    assert sum(memory.read().values()) == 0


@pytest.mark.parametrize(
    ("command", "name", "role"),
    [
        (["ray::ServeReplica:dflash:Gateway"], "ray::ServeRepli", "Gateway"),
        (["ray::VerifierActor"], "ray::VerifierAc", "VerifierActor"),
        (["/v/python", "-u", "/v/ray/log_monitor.py", "--x"], "python", "log_monitor.py"),
        (["/v/python", "-c", "import x"], "python3", "python3"),
        (["ray-dashboard-NodeHead-0 (x)"], "ray-dashboard-N", "ray-dashboard"),
        (["/v/ray/raylet", "--y"], "raylet", "raylet"),
    ],
)
def test_roles(command: list[str], name: str, role: str) -> None:
    assert role_of(command, name) == role


IDLE = {
    "dflash_requests_running": 0.0,
    "dflash_sequences_running": 0.0,
    "dflash_sequences_waiting": 0.0,
    "dflash_pages_in_use": 0.0,
    "dflash_pages_cached": 9.0,
    "dflash_failed_steps_total": 0.0,
    "dflash_preemptions_total": 3.0,
    "dflash_steps_total": 100.0,
    "dflash_completion_tokens_total": 1000.0,
    "dflash_cached_prompt_tokens_total": 64.0,
}


def report(**changes: object) -> SoakReport:
    tally = Tally()
    tally.count(STREAM, OK)
    tally.count(STREAM, LEFT)
    memory = {"Gateway": 100.0, "small": 10.0}
    values = {"metrics": IDLE, "before_mib": memory, "after_mib": memory} | changes
    return SoakReport(20.0, tally, **values)  # type: ignore[arg-type]


def test_a_clean_soak_meets_every_bar() -> None:
    assert all(report().bars().values())
    last = json.loads(render(report()).splitlines()[-1])
    assert last["bars_met"] and last["requests"]["left"] == 1


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({"metrics": IDLE | {"dflash_pages_in_use": 1.0}}, {"dflash_pages_in_use is 0 when idle"}),
        ({"metrics": IDLE | {"dflash_failed_steps_total": 1.0}}, {"no step failed"}),
        ({"metrics": IDLE | {"dflash_preemptions_total": 0.0}}, {"preemptions happened"}),
        ({"after_mib": {"Gateway": 104.0, "small": 11.0}}, set()),
        ({"after_mib": {"Gateway": 120.0, "small": 10.0}}, {"memory within 5 % of the start"}),
    ],
)
def test_what_misses_which_bar(changes: dict[str, object], missed: set[str]) -> None:
    bars = report(**changes).bars()
    assert {bar for bar, is_met in bars.items() if not is_met} == missed


@pytest.mark.parametrize(
    ("minutes", "is_met"),
    [
        ([100, 105, 108, 110, 110, 111, 110, 111], True),  # it has settled
        ([100, 102, 104, 106, 108, 110, 112, 114], False),  # it goes on
    ],
)
def test_a_role_may_settle_but_not_go_on_growing(minutes: list[float], is_met: bool) -> None:
    bars = report(samples_mib=[{"Gateway": mib, "small": mib} for mib in minutes]).bars()
    assert bars["Gateway grew by 5 % at most in the second half"] == is_met
    assert not any(bar.startswith("small") for bar in bars), "too small to tell"


def test_options_have_limits() -> None:
    assert parse_arguments([]).minutes == 20
    with pytest.raises(SystemExit):
        parse_arguments(["--minutes", "0"])
