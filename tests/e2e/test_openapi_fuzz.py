"""What ``/openapi.json`` of the started application promises holds for the whole application."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import httpx
import pytest
import schemathesis
from started_server import StartedServer

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "gateway"))

from openapi_fuzz import fuzz, fuzz_config

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("default")]

NUM_EXAMPLES = int(os.environ.get("DFLASH_EXAMPLES", "12"))
"""Random requests per operation; the gateway's own test goes through the boundaries."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_answers_are_as_documented(server: StartedServer, model: str) -> None:
    config = fuzz_config(NUM_EXAMPLES, seed=2, tries_boundaries=False)
    schema = schemathesis.openapi.from_url(f"{server.base_url}/openapi.json", config=config)
    report = fuzz(schema, model)
    print(report)
    assert report.errors == []
    assert report.failures == {}
    assert report.num_cases > 5 * NUM_EXAMPLES
    assert any(label == "POST /v1/chat/completions 200" for label in report.statuses)
    load = httpx.get(f"{server.base_url}/load").json()
    assert load["server_load"] == 0, "nothing is left running"
