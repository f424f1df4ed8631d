"""Contract with Ray's direct transport, on which the FeaturePool stands; fails first when Ray changes."""

from __future__ import annotations

import glob
from importlib.util import find_spec
from typing import Any

import pytest
import ray
import torch

from dflash_wire.records import GenerationRequest, TokenChunk
from gateway.coordinator.coordinator import Coordinator
from services.config import AppArgs
from services.engine_group import EngineGroup
from services.executors import settle
from services.feature_pool import FeatureReceiver, FeatureSender
from services.placement import FeatureRoute
from services.shm_transport import register_shm_transport
from services.spec import make_spec

pytestmark = [pytest.mark.serve, pytest.mark.filterwarnings("default")]


class Sender:
    def __init__(self, transport: str, device: str) -> None:
        register_shm_transport()
        self._sender = FeatureSender((8, 4), torch.float32, torch.device(device), transport)

    def reference(self) -> list[Any]:
        return [self._sender.reference()]

    def attached(self) -> None:
        self._sender.peer_attached()

    def fill(self, value: float) -> None:
        self._sender.pool.fill_(value)
        settle(self._sender.pool.device.type)


class Receiver:
    def __init__(self) -> None:
        register_shm_transport()

    def attach(self, references: list[Any], route: FeatureRoute) -> None:
        self._receiver = FeatureReceiver(references[0], route)

    def read(self, refresh: bool) -> float:
        if refresh:
            self._receiver.refresh()
        return float(self._receiver.pool.mean())


def _pair(route: FeatureRoute, device: str = "cpu", num_gpus: float = 0) -> tuple[Any, Any]:
    options = {"num_cpus": 0, "max_concurrency": 2, "enable_tensor_transport": True}
    options["num_gpus"] = num_gpus
    sender = ray.remote(Sender).options(**options).remote(route.transport, device)
    receiver = ray.remote(Receiver).options(**options).remote()
    ray.get(receiver.attach.remote(ray.get(sender.reference.remote()), route))
    ray.get(sender.attached.remote())
    return sender, receiver


def check_alias(sender: Any, receiver: Any) -> None:
    """Every write is seen, without a call of Ray's transport."""
    for value in (1.0, 2.5, -3.0):
        ray.get(sender.fill.remote(value))
        assert ray.get(receiver.read.remote(refresh=False)) == value


def check_pull(sender: Any, receiver: Any) -> None:
    """A write is seen when it is pulled, and not before."""
    ray.get(sender.fill.remote(1.0))
    assert ray.get(receiver.read.remote(refresh=True)) == 1.0
    for value in (2.5, -3.0):
        before = ray.get(receiver.read.remote(refresh=False))
        ray.get(sender.fill.remote(value))
        assert ray.get(receiver.read.remote(refresh=False)) == before
        assert ray.get(receiver.read.remote(refresh=True)) == value


def test_shm_alias(local_ray: None) -> None:
    check_alias(*_pair(FeatureRoute("shm", "alias")))


def test_shm_pull(local_ray: None) -> None:
    check_pull(*_pair(FeatureRoute("shm", "pull")))


@pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")
def test_nixl_pull(local_ray: None) -> None:
    """Between two processes' ordinary memory; cards differ in what UCX takes the bytes over."""
    check_pull(*_pair(FeatureRoute("nixl", "pull")))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_ipc_alias(local_ray: None) -> None:
    check_alias(*_pair(FeatureRoute("cuda_ipc", "alias"), "cuda", 0.5))


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")
def test_nixl_pull_between_gpus(local_ray: None) -> None:
    check_pull(*_pair(FeatureRoute("nixl", "pull"), "cuda", 1))


def test_no_segment_file_outlives_the_pairing(local_ray: None) -> None:
    before = set(glob.glob("/dev/shm/dflash-features-*"))
    _sender, _receiver = _pair(FeatureRoute("shm", "alias"))
    assert set(glob.glob("/dev/shm/dflash-features-*")) <= before


class _Keep:
    def __init__(self) -> None:
        self.chunks: list[TokenChunk] = []

    def publish(self, chunks: dict[str, list[TokenChunk]]) -> None:
        for mine in chunks.values():
            self.chunks += mine


ROUTES = [("shm", "alias"), ("shm", "pull"), ("nixl", "pull")]


def test_all_routes_draft_the_same(local_ray: None, app_args: AppArgs) -> None:
    """Features that arrive late or torn would not change tokens, only acceptance: compare cycles."""
    results = []
    for transport, mode in ROUTES:
        if transport == "nixl" and find_spec("nixl") is None:
            continue
        features = app_args.features.model_copy(update={"transport": transport, "mode": mode})
        args = app_args.model_copy(update={"features": features})
        group, sink = EngineGroup(args, make_spec(args)), _Keep()
        coordinator = Coordinator(group.rings[0], sink, group.limits, "static:8")
        coordinator.submit(GenerationRequest("r", list(range(100, 400)), 60))
        while coordinator.step():
            pass
        group.close()
        assert sink.chunks[-1].finish_reason == "length"
        results.append([(chunk.token_ids, chunk.cycle is None) for chunk in sink.chunks])
    assert results[1:] == results[:1] * (len(results) - 1)
