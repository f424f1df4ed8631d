"""The engine of the gateway's benchmark keeps the coordinator's habits."""

from __future__ import annotations

import inspect
import queue
import threading
import time
from collections.abc import Iterator

import pytest

from dflash_wire.records import GenerationRequest, TokenChunk
from loadtest import stamps
from services import paced_engine
from services.paced_engine import PacedCoordinator, PacedEngine, character_tokens
from services.route_hints import RouteHints

pytestmark = pytest.mark.unit

TIMEOUT_S = 30
TOKENS = character_tokens("models/demo/target")
TEXTS = {token_id: token for token, token_id in TOKENS.items()}


class Frames:
    """A sink that keeps every frame."""

    def __init__(self) -> None:
        self.published: queue.SimpleQueue[dict[str, list[TokenChunk]]] = queue.SimpleQueue()

    def publish(self, chunks: dict[str, list[TokenChunk]]) -> None:
        self.published.put(chunks)

    def next(self) -> dict[str, list[TokenChunk]]:
        return self.published.get(timeout=TIMEOUT_S)


@pytest.fixture
def frames() -> Frames:
    return Frames()


@pytest.fixture
def engine(frames: Frames) -> Iterator[PacedEngine]:
    engine = PacedEngine(frames, TOKENS, step_s=0.02)
    thread = threading.Thread(target=engine.run_forever)
    thread.start()
    yield engine
    engine.close()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def request(name: str, max_tokens: int, address: str = "here") -> GenerationRequest:
    return GenerationRequest(name, [5], max_tokens, frame_address=address)


def text_of(chunk: TokenChunk) -> str:
    return "".join(TEXTS[token_id] for token_id in chunk.token_ids)


def test_both_ends_write_the_same_stamps() -> None:
    for clock_s in (0.0, 1.234567, 16.777216, 98765.4321):
        assert paced_engine.stamp(clock_s) == stamps.stamp(clock_s)
    assert paced_engine.FIRST_TEXT == stamps.FIRST_TEXT


def test_one_token_at_once_then_a_stamp_per_step(engine: PacedEngine, frames: Frames) -> None:
    engine.submit(request("a", 8))
    (first,) = frames.next()["here"]
    assert (text_of(first), first.cycle, first.num_before) == (".", None, 0)
    (second,) = frames.next()["here"]
    assert stamps.age_s(text_of(second), time.perf_counter()) < TIMEOUT_S / 2
    assert second.cycle is not None and second.cycle.num_committed == 4
    (last,) = frames.next()["here"]
    assert (len(last.token_ids), last.num_before, last.finish_reason) == (3, 5, "length")


def test_all_rows_of_a_gateway_share_a_frame(engine: PacedEngine, frames: Frames) -> None:
    for name, address in (("a", "here"), ("b", "here"), ("c", "there")):
        engine.submit(request(name, 1000, address))
    while len(frame := frames.next()) < 2 or len(frame["here"]) < 2:
        pass
    assert {chunk.request_id for chunk in frame["here"]} == {"a", "b"}
    assert [chunk.request_id for chunk in frame["there"]] == ["c"]


def test_a_cancelled_request_gets_no_more(engine: PacedEngine, frames: Frames) -> None:
    engine.submit(request("a", 1000))
    engine.submit(request("b", 1000))
    engine.cancel("a")
    while [chunk.request_id for chunk in frames.next()["here"]] != ["b"]:
        pass
    assert [chunk.request_id for chunk in frames.next()["here"]] == ["b"]


def test_takes_the_calls_that_a_gateway_makes() -> None:
    """Serve would tell only at run time, with a failure of every request."""
    hints = RouteHints(page_size=16, expected_output_tokens=256).of(request("a", 8))
    inspect.signature(PacedCoordinator.generate).bind(None, b"frame", **hints)
