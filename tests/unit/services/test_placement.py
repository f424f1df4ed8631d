"""Where executors go and how features travel, for every configuration that asks for something."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_wire.errors import ConfigError
from services.config import AppArgs
from services.placement import FeatureRoute, bundles, choose_placement, choose_route

pytestmark = pytest.mark.unit

ONE_CARD = {
    "model": {"device": "cuda"},
    "verifier": {"num_gpus": 0.7},
    "drafter": {"num_gpus": 0.3},
}
TWO_CARDS = {
    "model": {"device": "cuda"},
    "verifier": {"num_gpus": 1},
    "drafter": {"num_gpus": 1},
}
OVER_TCP = {"link": {"kind": "tcp"}, "placement": "spread"}


def args_of(*parts: dict[str, Any]) -> AppArgs:
    together: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            is_section = isinstance(value, dict)
            together[name] = {**together.get(name, {}), **value} if is_section else value
    return AppArgs.model_validate(together)


@pytest.mark.parametrize(
    ("parts", "placement", "transport", "mode"),
    [
        ([], "same_node", "shm", "alias"),
        ([{"features": {"mode": "pull"}}], "same_node", "shm", "pull"),
        ([{"features": {"transport": "nixl"}}], "same_node", "nixl", "pull"),
        ([OVER_TCP], "spread", "nixl", "pull"),
        ([ONE_CARD], "same_gpu", "cuda_ipc", "alias"),
        ([ONE_CARD, {"placement": "same_node"}], "same_node", "nixl", "pull"),
        ([ONE_CARD, {"model": {"drafters": {"b": "ngram"}}}], "same_node", "nixl", "pull"),
        ([TWO_CARDS], "same_node", "nixl", "pull"),
        ([TWO_CARDS, OVER_TCP], "spread", "nixl", "pull"),
        ([TWO_CARDS, {"verifier": {"tensor_parallel": 2}}], "same_node", "nixl", "pull"),
    ],
)
def test_what_auto_takes(
    parts: list[dict[str, Any]], placement: str, transport: str, mode: str
) -> None:
    args = args_of(*parts)
    assert choose_placement(args) == placement
    assert choose_route(args) == FeatureRoute(transport, mode)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([{"placement": "same_gpu"}], "needs device cuda"),
        ([TWO_CARDS, {"placement": "same_gpu"}], "add up to 2"),
        ([{"placement": "spread"}], "needs link.kind tcp"),
        ([{"features": {"transport": "cuda_ipc"}}], "does not work on device 'cpu'"),
        ([ONE_CARD, {"features": {"transport": "shm"}}], "does not work on device 'cuda'"),
        ([TWO_CARDS, {"features": {"transport": "cuda_ipc"}}], "needs placement same_gpu"),
        ([OVER_TCP, {"features": {"transport": "shm"}}], "does not reach other nodes"),
        ([ONE_CARD, {"features": {"mode": "pull"}}], "'pull' does not work with transport 'cuda_i"),
        ([TWO_CARDS, {"features": {"mode": "alias"}}], "'alias' does not work with transport 'nix"),
    ],
)
def test_what_does_not_work_is_refused(parts: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_route(args_of(*parts))


def test_bundles_hold_what_actors_ask_for() -> None:
    tensor_parallel = {
        "verifier": {"tensor_parallel": 2, "num_cpus": 1},
        "drafter": {"num_cpus": 2},
    }
    args = args_of(TWO_CARDS, tensor_parallel)
    assert bundles(args, "same_node") == [{"CPU": 4.25, "GPU": 3}]
    assert bundles(args, "spread") == [{"CPU": 2.25, "GPU": 2}, {"CPU": 2, "GPU": 1}]
    assert bundles(args_of(ONE_CARD), "same_gpu") == [{"CPU": 1.25, "GPU": 1.0}]
    several = args_of({"drafter": {"shared_by": 3}, "model": {"drafters": {"b": "x"}}})
    assert bundles(several, "same_node") == [{"CPU": 2.75}]
