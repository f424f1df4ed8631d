"""Fixtures of the gateway's tests: a tiny tokenizer, settings, and clients over ASGI."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from drafter.training.demo.tokenizer import TURN_END, train_tokenizer
from gateway.app import create_app
from gateway.chat_tokenizer import ChatTokenizer
from gateway.metrics import GatewayMetrics
from gateway.state import GatewaySettings, SamplingDefaults

sys.path.insert(0, str(Path(__file__).parent))

from gateway_fakes import Encode, FakeEngine, Item, Script, Serve, Served

TEXTS = ["the quick brown fox jumps over the lazy dog", "one two three four", "user assistant"]


@pytest.fixture(scope="session")
def hf_tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS * 20, vocab_size=330)


@pytest.fixture(scope="session")
def tokenizer(hf_tokenizer: PreTrainedTokenizerFast) -> ChatTokenizer:
    return ChatTokenizer(hf_tokenizer)


@pytest.fixture(scope="session")
def encode(hf_tokenizer: PreTrainedTokenizerFast) -> Encode:
    """Return the token ids of a text, special tokens in it included."""
    return lambda text: hf_tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture(scope="session")
def settings(hf_tokenizer: PreTrainedTokenizerFast) -> GatewaySettings:
    return GatewaySettings(
        model_id="demo/model",
        max_context=128,
        vocab_size=330,
        eos_token_ids=(hf_tokenizer.convert_tokens_to_ids(TURN_END),),
        max_draft_block_size=16,
        default_policy="static:8",
        version="1.2.3",
        sampling=SamplingDefaults(temperature=0.7, top_p=0.9, top_k=20),
        max_body_bytes=4000,
        max_choices_per_request=4,
        created=1700000000,
    )


@pytest.fixture
def serve(tokenizer: ChatTokenizer, settings: GatewaySettings) -> Serve:
    def build(script: Script | list[Item]) -> Served:
        engine = FakeEngine(script)
        metrics = GatewayMetrics()
        app = create_app(engine, tokenizer, settings, metrics=metrics)
        return Served(app, engine, metrics)

    return build
