from __future__ import annotations

import httpx
import pytest
from gateway_fakes import NUM_DRAFT_TOKENS, Encode, FakeEngine, Item, Serve, cycle, last, sse_data
from prometheus_client.parser import text_string_to_metric_families

from dflash_wire.errors import EngineUnavailableError
from dflash_wire.gauges import GroupGauges, SchedulerGauges
from dflash_wire.records import (
    CycleStats,
    GenerationRequest,
    TokenChunk,
)
from gateway.app import create_app, create_app_from
from gateway.chat_tokenizer import ChatTokenizer
from gateway.metrics import GatewayMetrics
from gateway.state import GatewaySettings, GatewayState


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Return every sample under its name and label values."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.asyncio
async def test_counts_after_requests(serve: Serve, encode: Encode) -> None:
    one = encode("o")
    served = serve(
        lambda _: [encode("the quick"), cycle(one * 4), cycle(one), last([*one, *one, *one])]
    )
    assert (await served.complete(prompt=["one two", "one"])).status_code == 200
    assert (await served.chat(model="other")).status_code == 404
    assert (await served.http.get("/nowhere/1")).status_code == 404
    response = await served.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    got = samples(response.text)
    assert got["dflash_http_requests_total", "/v1/completions", "200"] == 1
    assert got["dflash_http_requests_total", "/v1/chat/completions", "404"] == 1
    assert got["dflash_http_requests_total", "unmatched", "404"] == 1
    assert got["dflash_errors_total", "model_not_found"] == 1
    assert got["dflash_errors_total", "not_found"] == 1
    assert got["dflash_prompt_tokens_total",] == len(encode("one two")) + len(encode("one"))
    assert got["dflash_completion_tokens_total",] == 2 * (len(encode("the quick")) + 8)
    assert got["dflash_cycles_total", "default"] == 6
    assert got["dflash_committed_tokens_total", "default"] == 16
    assert got["dflash_draft_tokens_total", "default"] == 6 * NUM_DRAFT_TOKENS
    assert [got["dflash_accepted_drafts_total", "default", str(k)] for k in (1, 2, 3)] == [4, 4, 2]
    assert got["dflash_draft_seconds_total", "default"] == pytest.approx(0.06)
    assert got["dflash_verify_seconds_total", "default"] == pytest.approx(0.12)
    assert got["dflash_overhead_seconds_total", "default"] == pytest.approx(0.003)
    assert got["dflash_time_to_first_token_seconds_count",] == 2
    assert got["dflash_time_per_output_token_seconds_count",] == 2
    assert got["dflash_requests_running",] == 0


@pytest.mark.asyncio
async def test_errors_inside_a_stream_are_counted(serve: Serve, encode: Encode) -> None:
    served = serve([encode("the"), KeyError("x")])
    await served.chat(stream=True)
    got = samples(served.metrics.render().decode())
    assert got["dflash_errors_total", "internal_error"] == 1
    assert got["dflash_http_requests_total", "/v1/chat/completions", "200"] == 1


@pytest.mark.asyncio
async def test_model_paths_are_one_series(serve: Serve) -> None:
    served = serve([])
    for name in ("demo/model", "a", "b"):
        await served.http.get(f"/v1/models/{name}")
    got = samples(served.metrics.render().decode())
    assert got["dflash_http_requests_total", "/v1/models/{model_id:path}", "404"] == 2


@pytest.mark.asyncio
async def test_running_is_up_while_generating(serve: Serve, encode: Encode) -> None:
    seen: list[float] = []
    served = serve([])

    def script(_: GenerationRequest) -> list[Item]:
        seen.append(samples(served.metrics.render().decode())["dflash_requests_running",])
        return [last([])]

    served.engine.script = script
    await served.chat()
    assert seen == [1]


def test_times_of_a_sequence() -> None:
    now = [10.0]
    metrics = GatewayMetrics(clock=lambda: now[0])
    meter = metrics.start_sequence(arrived=9.0, num_prompt_tokens=3)
    now[0] = 11.0
    meter.add_chunk(4, None)
    now[0] = 11.5
    meter.add_chunk(0, None)
    now[0] = 12.0
    meter.add_chunk(5, None)
    meter.finish()
    got = samples(metrics.render().decode())
    assert got["dflash_time_to_first_token_seconds_sum",] == pytest.approx(2.0)
    # Tokens of the first chunk cost no time after it: 1 s for the 5 tokens that followed.
    assert got["dflash_time_per_output_token_seconds_sum",] == pytest.approx(0.2)
    assert got["dflash_completion_tokens_total",] == 9


def test_one_chunk_has_no_time_per_token() -> None:
    metrics = GatewayMetrics()
    meter = metrics.start_sequence(metrics.clock(), 1)
    meter.add_chunk(4, None)
    meter.finish()
    got = samples(metrics.render().decode())
    assert got["dflash_time_per_output_token_seconds_count",] == 0
    assert got["dflash_time_to_first_token_seconds_count",] == 1


def test_two_apps_do_not_share_metrics(tokenizer: ChatTokenizer, settings: GatewaySettings) -> None:
    create_app(FakeEngine([]), tokenizer, settings)
    create_app(FakeEngine([]), tokenizer, settings)


@pytest.mark.asyncio
async def test_tokens_after_a_stop_string_are_not_counted(serve: Serve, encode: Encode) -> None:
    served = serve([encode("the"), cycle([*encode("the"), *encode("!"), *encode(" fox")])])
    body = (await served.chat(stop="!")).json()
    got = samples(served.metrics.render().decode())
    num_the = len(encode("the"))
    assert body["usage"]["completion_tokens"] == 2 * num_the + 1
    assert got["dflash_completion_tokens_total",] == 2 * num_the + 1
    # The drafts up to the stop string were committed, and so was the one that completed it.
    assert got["dflash_cycles_total", "default"] == 1
    assert got["dflash_committed_tokens_total", "default"] == num_the + 1
    assert [
        got["dflash_accepted_drafts_total", "default", str(k + 1)] for k in range(num_the + 1)
    ] == [1] * (num_the + 1)
    assert ("dflash_accepted_drafts_total", "default", str(num_the + 2)) not in got


@pytest.mark.asyncio
async def test_cycles_of_a_failed_sequence_are_counted(serve: Serve, encode: Encode) -> None:
    served = serve([encode("the"), cycle(encode(" fox")), ValueError("broken")])
    assert (await served.chat()).status_code == 500
    got = samples(served.metrics.render().decode())
    assert got["dflash_cycles_total", "default"] == 1
    assert got["dflash_committed_tokens_total", "default"] == len(encode(" fox"))


@pytest.mark.asyncio
async def test_cached_prompt_tokens(serve: Serve, encode: Encode) -> None:
    first = TokenChunk("", encode("the"), num_cached_tokens=32)
    served = serve([first, last(encode(" end"))])
    body = (await served.chat(cache_salt="tenant-7")).json()
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}
    assert served.engine.requests[0].cache_salt == "tenant-7"
    assert samples(served.metrics.render().decode())["dflash_cached_prompt_tokens_total",] == 32


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_the_policy_that_the_engine_applied_is_reported(
    serve: Serve, encode: Encode, stream: bool
) -> None:
    """An operator may have changed the default, and the gateway's settings are older than that."""
    one = encode("o")
    for told, drafter in (("off", "none"), ("adaptive", "default")):
        served = serve([TokenChunk("", one, policy=told), cycle(one), last(one)])
        response = await served.chat(stream=stream, dflash={"stats": True})
        body = sse_data(response.text)[-2] if stream else response.json()
        assert (body["dflash"]["policy"], body["dflash"]["drafter"]) == (told, drafter)
        got = samples(served.metrics.render().decode())
        assert got["dflash_cycles_total", drafter] == 2
        assert sum(value for key, value in got.items() if key[0] == "dflash_cycles_total") == 2


@pytest.mark.asyncio
async def test_acceptance_is_counted_by_how_the_prompt_began(serve: Serve, encode: Encode) -> None:
    one = encode("o")
    first = TokenChunk("", one, num_cached_tokens=16)
    served = serve([first, cycle(one * 4), cycle(one * 2), last(one)])
    await served.chat()
    plain = TokenChunk("", one, cycle=CycleStats(0, 0, 1, 0.0, 1.0, 0.0))
    served.engine.script = lambda _: [TokenChunk("", one, num_cached_tokens=0), plain, last(one)]
    await served.chat()
    got = samples(served.metrics.render().decode())
    assert got["dflash_prefix_cycles_total", "default", "hit"] == 3
    assert got["dflash_prefix_cycle_tokens_total", "default", "hit"] == 7
    assert got["dflash_prefix_cycles_total", "default", "miss"] == 1, (
        "a cycle without drafts says nothing"
    )
    assert got["dflash_prefix_cycle_tokens_total", "default", "miss"] == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("salt", ["", 7, "s" * 257])
async def test_salts_are_short_texts(serve: Serve, salt: object) -> None:
    response = await serve([]).chat(cache_salt=salt)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "cache_salt"


@pytest.mark.asyncio
async def test_engine_groups_are_reported_as_they_are_now(serve: Serve) -> None:
    served = serve([])
    served.engine.groups = [
        GroupGauges("a", 3, 1, 900, 64, 12, 20, 5, 700, 1),
        GroupGauges("b", 0, 0, 0, 64, 0, 64, 0, 9, 0),
    ]
    got = samples((await served.http.get("/metrics")).text)
    assert got["dflash_sequences_running", "a"] == 3
    assert got["dflash_sequences_waiting", "a"] == 1
    assert got["dflash_outstanding_tokens", "a"] == 900
    assert (got["dflash_pages_in_use", "a"], got["dflash_pages_in_use", "b"]) == (12, 0)
    assert (got["dflash_pages_cached", "a"], got["dflash_pages_cached", "b"]) == (20, 64)
    assert got["dflash_pages", "b"] == 64
    assert got["dflash_preemptions_total", "a"] == 5
    assert got["dflash_steps_total", "b"] == 9
    assert got["dflash_failed_steps_total", "a"] == 1
    served.engine.groups = []
    got = samples((await served.http.get("/metrics")).text)
    assert ("dflash_pages", "a") not in got, "a group that is gone must not linger"


@pytest.mark.asyncio
async def test_block_schedulers_are_reported_per_lane(serve: Serve) -> None:
    served = serve([])
    one = SchedulerGauges("speculate", 3, 1.1, 0.9, 0.2, [0.8, 0.5], [0, 4, 0, 2])
    two = one._replace(state="plain", num_switches=0)
    group = GroupGauges("a", 3, 1, 900, 64, 12, 20, 5, 700, 1, (one, two))
    served.engine.groups = [group]
    got = samples((await served.http.get("/metrics")).text)
    assert got["dflash_block_scheduler_state", "a", "0", "speculate"] == 1
    assert got["dflash_block_scheduler_state", "a", "1", "plain"] == 1
    assert got["dflash_block_switches_total", "a", "0"] == 3
    assert got["dflash_block_observed_over_predicted", "a", "0", "tokens"] == 1.1
    assert got["dflash_block_observed_over_predicted", "a", "0", "time"] == 0.9
    assert got["dflash_block_brier_score", "a", "1"] == 0.2
    assert got["dflash_block_survival", "a", "0", "2"] == 0.5
    assert got["dflash_block_width_bucket", "a", "0", "1.0"] == 4
    assert got["dflash_block_width_bucket", "a", "0", "2.0"] == 4
    assert got["dflash_block_width_bucket", "a", "0", "+Inf"] == 6
    assert got["dflash_block_width_count", "a", "0"] == 6
    assert got["dflash_block_width_sum", "a", "0"] == 10


@pytest.mark.asyncio
async def test_metrics_answer_while_the_engine_starts() -> None:
    def not_yet() -> GatewayState:
        raise EngineUnavailableError("starting")

    transport = httpx.ASGITransport(app=create_app_from(not_yet))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.get("/metrics")
    assert response.status_code == 200
    assert 'dflash_cycles_total{drafter="default"} 0.0' in response.text
