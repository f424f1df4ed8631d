"""After the first server has ended: the same application behind HAProxy."""

from __future__ import annotations

from pathlib import Path

import grpc
import openai
import pytest
from started_server import StartedServer, feature_segments

from dflash_wire.v1 import generation_pb2 as pb
from dflash_wire.v1.generation_pb2_grpc import GenerationStub

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("default")]

QUESTION = "Tom has 12 pens and buys 30 more. How many pens does Tom have?"


def check_grpc(server: StartedServer, model: str, expected: str) -> None:
    conversation = pb.Conversation(messages=[pb.ChatMessage(role="user", content=QUESTION)])
    request = pb.GenerateRequest(
        model=model, conversation=conversation, temperature=0.0, max_tokens=40
    )
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        stub = GenerationStub(channel)
        assert stub.Generate(request).choices[0].text == expected
        chunks = list(stub.GenerateStream(request))
        assert len(chunks) > 1
        assert "".join(chunk.text for chunk in chunks) == expected
        request.max_tokens = 5000
        for call in (stub.Generate, lambda message: list(stub.GenerateStream(message))):
            with pytest.raises(grpc.RpcError) as caught:
                call(request)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "[context_length_exceeded]" in caught.value.details()


def test_streams_and_errors_through_haproxy(tmp_path: Path) -> None:
    server = StartedServer(tmp_path, has_haproxy=True)
    try:
        server.wait_until_ready()
        with openai.OpenAI(
            base_url=f"{server.base_url}/v1", api_key="none", max_retries=0
        ) as client:
            model = client.models.list().data[0].id
            fields = {
                "model": model,
                "messages": [{"role": "user", "content": QUESTION}],
                "max_tokens": 40,
                "temperature": 0,
            }
            whole = client.chat.completions.create(**fields)
            stream = client.chat.completions.create(**fields, stream=True)
            pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
            assert "".join(pieces) == whole.choices[0].message.content
            assert len([piece for piece in pieces if piece]) > 1
            with pytest.raises(openai.NotFoundError) as caught:
                client.chat.completions.create(**{**fields, "model": "another"})
            assert caught.value.code == "model_not_found"
        check_grpc(server, model, whole.choices[0].message.content)
    finally:
        server.stop()
    assert server.survivors() == []
    assert feature_segments() <= server.segments_before
