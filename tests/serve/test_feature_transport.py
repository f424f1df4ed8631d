"""Contract with Ray's direct transport, on which the FeaturePool stands; fails first when Ray changes."""

from __future__ import annotations

import glob
from typing import Any

import pytest
import ray
import torch

from dflash_wire.records import GenerationRequest, TokenChunk
from gateway.coordinator.coordinator import Coordinator
from services.config import AppArgs
from services.engine_group import EngineGroup
from services.feature_pool import FeatureReceiver, FeatureSender
from services.shm_transport import register_shm_transport
from services.spec import make_spec

pytestmark = [pytest.mark.serve, pytest.mark.filterwarnings("default")]


class Sender:
    def __init__(self) -> None:
        register_shm_transport()
        self._sender = FeatureSender((8, 4), torch.float32, torch.device("cpu"), "auto")

    def reference(self) -> list[Any]:
        return [self._sender.reference()]

    def attached(self) -> None:
        self._sender.peer_attached()

    def fill(self, value: float) -> None:
        self._sender.pool.fill_(value)


class Receiver:
    def __init__(self) -> None:
        register_shm_transport()

    def attach(self, references: list[Any], mode: str) -> None:
        self._receiver = FeatureReceiver(references[0], mode)

    def read(self, refresh: bool) -> float:
        if refresh:
            self._receiver.refresh()
        return float(self._receiver.pool.mean())


def _pair(mode: str) -> tuple[Any, Any]:
    options = {"num_cpus": 0, "max_concurrency": 2, "enable_tensor_transport": True}
    sender = ray.remote(Sender).options(**options).remote()
    receiver = ray.remote(Receiver).options(**options).remote()
    ray.get(receiver.attach.remote(ray.get(sender.reference.remote()), mode))
    ray.get(sender.attached.remote())
    return sender, receiver


def test_alias_sees_every_write_without_a_ray_call(local_ray: None) -> None:
    sender, receiver = _pair("alias")
    for value in (1.0, 2.5, -3.0):
        ray.get(sender.fill.remote(value))
        assert ray.get(receiver.read.remote(refresh=False)) == value


def test_pull_sees_a_write_when_it_pulls_and_not_before(local_ray: None) -> None:
    sender, receiver = _pair("pull")
    ray.get(sender.fill.remote(1.0))
    assert ray.get(receiver.read.remote(refresh=True)) == 1.0
    for value in (2.5, -3.0):
        before = ray.get(receiver.read.remote(refresh=False))
        ray.get(sender.fill.remote(value))
        assert ray.get(receiver.read.remote(refresh=False)) == before
        assert ray.get(receiver.read.remote(refresh=True)) == value


def test_no_segment_file_outlives_the_pairing(local_ray: None) -> None:
    before = set(glob.glob("/dev/shm/dflash-features-*"))
    _sender, _receiver = _pair("alias")
    assert set(glob.glob("/dev/shm/dflash-features-*")) <= before


class _Keep:
    def __init__(self) -> None:
        self.chunks: list[TokenChunk] = []

    def publish(self, chunks: dict[str, list[TokenChunk]]) -> None:
        for mine in chunks.values():
            self.chunks += mine


def test_pull_and_alias_draft_the_same(local_ray: None, app_args: AppArgs) -> None:
    """Features that arrive late or torn would not change tokens, only acceptance: compare cycles."""
    results = {}
    for mode in ("alias", "pull"):
        features = app_args.features.model_copy(update={"mode": mode})
        args = app_args.model_copy(update={"features": features})
        group, sink = EngineGroup(args, make_spec(args)), _Keep()
        coordinator = Coordinator(group.rings[0], sink, group.limits, "static:8")
        coordinator.submit(GenerationRequest("r", list(range(100, 400)), 60))
        while coordinator.step():
            pass
        group.close()
        assert sink.chunks[-1].finish_reason == "length"
        results[mode] = [(chunk.token_ids, chunk.cycle is None) for chunk in sink.chunks]
    assert results["alias"] == results["pull"]
