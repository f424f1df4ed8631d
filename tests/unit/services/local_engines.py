"""The embedded pair in this process, for tests that need the real engines and not Ray."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from dflash_wire.ports import EngineLimits
from dflash_wire.records import GenerationRequest, TokenChunk
from gateway.chat_tokenizer import ChatTokenizer
from gateway.coordinator import Coordinator
from loadtest import prompt_sets
from services.local import LocalRing, build_local_ring
from services.spec import make_spec
from services.yaml_args import read_app_args

ROOT = Path(__file__).resolve().parents[3]
END_OF_SEQUENCE = 2


class Collector:
    """Sink that keeps every chunk."""

    def __init__(self) -> None:
        self.chunks: dict[str, list[TokenChunk]] = {}

    def publish(self, chunks: dict[str, list[TokenChunk]]) -> None:
        for mine in chunks.values():
            for chunk in mine:
                assert chunk.error is None, chunk.error
                self.chunks.setdefault(chunk.request_id, []).append(chunk)

    def tokens(self, request_id: str) -> list[int]:
        return [t for chunk in self.chunks[request_id] for t in chunk.token_ids]

    def answer(self, request_id: str) -> tuple[list[int], str | None]:
        return self.tokens(request_id), self.chunks[request_id][-1].finish_reason

    def num_cached(self, request_id: str) -> int:
        return self.chunks[request_id][0].num_cached_tokens or 0


def build_engines(**engine_args: object) -> tuple[LocalRing, EngineLimits]:
    """The engines of ``config.yaml``, its ``engine`` section changed."""
    torch.set_num_threads(1)
    args = read_app_args(ROOT / "config.yaml")
    engine = args.engine.model_copy(update=engine_args)
    return build_local_ring(make_spec(args.model_copy(update={"engine": engine})))


def encoded_prompts(names: str) -> list[list[int]]:
    """Token ids of prompt sets in the served template."""
    tokenizer = ChatTokenizer.load(str(ROOT / "models/demo/target"))
    return [tokenizer._encode_chat(prompt.messages) for prompt in prompt_sets.load(names)]


def run(coordinator: Coordinator, requests: Iterable[GenerationRequest], per_step: int) -> None:
    """Submit ``per_step`` requests before each step; go on until all have ended."""
    waiting = list(requests)
    while waiting or coordinator.snapshot().num_running or coordinator.snapshot().num_waiting:
        for request in waiting[:per_step]:
            coordinator.submit(request)
        del waiting[:per_step]
        coordinator.step()
        coordinator.check_integrity()
