"""The application as a user starts it: ``serve run config.yaml`` in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from started_server import StartedServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartedServer]:
    started = StartedServer(tmp_path_factory.mktemp("server"))
    try:
        started.wait_until_ready()
        yield started
    finally:
        started.stop()


@pytest.fixture
def client(server: StartedServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id
