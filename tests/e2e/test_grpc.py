"""gRPC against the started application: generate, stream, models, health, reflection, errors."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import httpx
import openai
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from started_server import StartedServer

from dflash_wire.v1 import generation_pb2 as pb
from dflash_wire.v1.generation_pb2_grpc import GenerationStub

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("default")]

QUESTION = "Tom has 3 apples and buys 4 more. How many apples now?"


@pytest.fixture
def channel(server: StartedServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        yield channel


def request(model: str, **fields: object) -> pb.GenerateRequest:
    conversation = pb.Conversation(messages=[pb.ChatMessage(role="user", content=QUESTION)])
    values = {"temperature": 0.0, "max_tokens": 40, **fields}
    return pb.GenerateRequest(model=model, conversation=conversation, **values)


def test_grpc_answers_what_http_answers(
    channel: grpc.Channel, client: openai.OpenAI, model: str
) -> None:
    stub = GenerationStub(channel)
    plain = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=40,
    )
    whole = stub.Generate(request(model, dflash=pb.DFlashOptions(stats=True)))
    assert whole.choices[0].text == plain.choices[0].message.content
    assert whole.usage.completion_tokens == plain.usage.completion_tokens
    assert whole.stats[0].policy == "adaptive"
    chunks = list(stub.GenerateStream(request(model)))
    assert "".join(chunk.text for chunk in chunks) == whole.choices[0].text
    assert len(chunks) > 1
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].finish_reason == whole.choices[0].finish_reason


def test_errors_have_canonical_codes(channel: grpc.Channel, model: str) -> None:
    stub = GenerationStub(channel)
    for call in (stub.Generate, lambda message: list(stub.GenerateStream(message))):
        with pytest.raises(grpc.RpcError) as caught:
            call(request("nope"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert "[model_not_found]" in caught.value.details()
        with pytest.raises(grpc.RpcError) as caught:
            call(request(model, more_json='{"best_of": 2}'))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "[unsupported_parameter]" in caught.value.details()
        with pytest.raises(grpc.RpcError) as caught:
            call(request(model, max_tokens=5000))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "[context_length_exceeded]" in caught.value.details()
        assert "2048" in caught.value.details()


def test_processors_and_log_probabilities_are_those_of_http(
    channel: grpc.Channel, client: openai.OpenAI, model: str
) -> None:
    fields = {
        **{"temperature": 0.8, "seed": 4, "frequency_penalty": 0.7, "repetition_penalty": 1.1},
        **{"bad_words": ["apples"], "min_tokens": 20, "min_p": 0.02},
    }
    mine = request(model, logprobs=2, prompt_logprobs=1, return_token_ids=True, **fields)
    (choice,) = GenerationStub(channel).Generate(mine).choices
    openai_fields = {name: fields.pop(name) for name in ("temperature", "seed")}
    openai_fields["frequency_penalty"] = fields.pop("frequency_penalty")
    plain = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=40,
        logprobs=True,
        top_logprobs=2,
        extra_body=fields,
        **openai_fields,
    )
    expected = plain.choices[0].logprobs.content
    assert choice.text == plain.choices[0].message.content
    assert len(choice.logprobs) == plain.usage.completion_tokens >= 20
    assert [list(entry.token) for entry in choice.logprobs] == [e.bytes for e in expected]
    numbers = [entry.logprob for entry in choice.logprobs]
    assert numbers == pytest.approx([entry.logprob for entry in expected], abs=1e-4)
    chunks = list(GenerationStub(channel).GenerateStream(mine))
    streamed = [entry.logprob for chunk in chunks for entry in chunk.logprobs]
    assert streamed == pytest.approx(numbers, abs=1e-4)
    prompt = [entry for chunk in chunks for entry in chunk.prompt_logprobs]
    assert [entry.token_id for entry in prompt] == list(chunks[0].prompt_token_ids)


def test_models_health_and_reflection(channel: grpc.Channel, model: str) -> None:
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
        ProtoReflectionDescriptorDatabase,
    )

    (found,) = GenerationStub(channel).ListModels(pb.ListModelsRequest()).models
    assert (found.id, found.max_model_len) == (model, 2048)
    health = HealthStub(channel).Check(HealthCheckRequest())
    assert health.status == HealthCheckResponse.SERVING
    services = ProtoReflectionDescriptorDatabase(channel).get_services()
    assert {"dflash_wire.v1.Generation", "grpc.health.v1.Health"} <= set(services)


def test_cancelling_a_stream_ends_the_request(
    server: StartedServer, channel: grpc.Channel, model: str
) -> None:
    stream = GenerationStub(channel).GenerateStream(
        request(model, max_tokens=1500, ignore_eos=True)
    )
    next(stream)
    stream.cancel()
    for _ in range(300):
        metrics = httpx.get(f"{server.base_url}/metrics").text
        (line,) = [x for x in metrics.splitlines() if x.startswith("dflash_requests_running ")]
        if float(line.split()[1]) == 0:
            return
    raise AssertionError("the request still runs")
