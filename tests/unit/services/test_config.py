"""The application's arguments: defaults, and errors that name what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from services.config import AppArgs, AutoscalingArgs, Section
from services.placement import bundles, choose_placement, choose_route
from services.yaml_args import read_app_args

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]


def sections() -> list[type[Section]]:
    defaults = [field.default for field in AppArgs.model_fields.values()]
    given = [type(value) for value in defaults if isinstance(value, Section)]
    return [AppArgs, AutoscalingArgs, *given]


def test_defaults_are_complete() -> None:
    args = AppArgs()
    assert args == AppArgs.model_validate({})
    assert args.engine.policy == "adaptive"
    assert (args.model.dtype, args.model.device) == ("float32", "cpu")


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"models": {}}, "models"),
        ({"model": {"path": "x"}}, r"model\.path"),
        ({"engine": {"block_size": 8}}, r"engine\.block_size"),
        ({"verifier": {"gpus": 1}}, r"verifier\.gpus"),
        ({"drafter": {"threads": 1}}, r"drafter\.threads"),
        ({"block_scheduler": {"widths": [4]}}, r"block_scheduler\.widths"),
        ({"features": {"transports": "shm"}}, r"features\.transports"),
        ({"link": {"timeout": 1}}, r"link\.timeout"),
        ({"gateway": {"port": 8000}}, r"gateway\.port"),
        ({"routing": {"bound": 1}}, r"routing\.bound"),
        (
            {"autoscaling": {"max_engine_groups": 2, "min_replicas": 1}},
            r"autoscaling\.min_replicas",
        ),
    ],
)
def test_unknown_keys_are_named(values: dict[str, Any], place: str) -> None:
    with pytest.raises(ValidationError, match=rf"{place}\n\s+Extra inputs are not permitted"):
        AppArgs.model_validate(values)


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"model": {"dtype": "int8"}}, r"model\.dtype"),
        ({"model": {"device": "tpu"}}, r"model\.device"),
        ({"engine": {"page_size": 0}}, r"engine\.page_size"),
        ({"engine": {"max_context": 1}}, r"engine\.max_context"),
        ({"block_scheduler": {"draft_widths": [0]}}, r"block_scheduler\.draft_widths"),
        ({"block_scheduler": {"table": [[8, 4], [2, 8]]}}, r"block_scheduler\.table"),
        ({"block_scheduler": {"target_tpot_ms": 0}}, r"block_scheduler\.target_tpot_ms"),
        ({"block_scheduler": {"sweep_s": -1}}, r"block_scheduler\.sweep_s"),
        ({"gateway": {"admin_key": "short"}}, r"gateway\.admin_key"),
        ({"features": {"mode": "push"}}, r"features\.mode"),
        ({"link": {"step_timeout_s": 0}}, r"link\.step_timeout_s"),
        ({"num_engine_groups": 0}, "num_engine_groups"),
        ({"model": {"id": ""}}, r"model\.id"),
        ({"verifier": {"num_cpus": float("inf")}}, r"verifier\.num_cpus"),
        ({"engine": {"num_pages": 10**14}}, r"engine\.num_pages"),
        ({"drafter": {"shared_by": 0}}, r"drafter\.shared_by"),
        ({"verifier": {"shared_by": 2}}, r"verifier\.shared_by"),
        ({"verifier": {"tensor_parallel": 0}}, r"verifier\.tensor_parallel"),
        ({"drafter": {"tensor_parallel": 2}}, r"drafter\.tensor_parallel"),
        ({"features": {"transport": "nccl"}}, r"features\.transport"),
        ({"placement": "anywhere"}, "placement"),
        ({"model": {"drafters": {"a b": "x"}}}, r"model\.drafters"),
        ({"model": {"drafters": {"default": "x"}}}, "'default' has a meaning of its own"),
        ({"model": {"drafters": {"none": "x"}}}, "'none' has a meaning of its own"),
        (
            {"model": {"thinking_drafter": "x"}},
            "thinking_drafter: there is no drafter 'x', only default",
        ),
    ],
)
def test_wrong_values_are_named(values: dict[str, Any], place: str) -> None:
    with pytest.raises(ValidationError, match=place):
        AppArgs.model_validate(values)


def test_arguments_do_not_change() -> None:
    args = AppArgs()
    with pytest.raises(ValidationError, match="frozen"):
        args.engine.num_pages = 3  # type: ignore[misc]


def test_every_section_is_strict_and_every_field_described() -> None:
    assert len(sections()) == 11
    for section in sections():
        assert section.model_config["extra"] == "forbid", section
        for name, field in section.model_fields.items():
            is_section = isinstance(field.default, Section)
            assert is_section or field.description, f"{section.__name__}.{name}"


def test_an_unquoted_off_is_the_policy() -> None:
    """YAML reads it as false."""
    assert AppArgs.model_validate({"engine": {"policy": False}}).engine.policy == "off"


def test_the_default_drafter_is_the_first() -> None:
    model = AppArgs.model_validate(
        {"model": {"drafter": "a", "drafters": {"b": "x", "c": "y"}, "non_thinking_drafter": "c"}}
    ).model
    assert list(model.all_drafters.items()) == [("default", "a"), ("b", "x"), ("c", "y")]
    assert (model.thinking_drafter, model.non_thinking_drafter) == (None, "c")


def test_lanes_have_a_cpu_each() -> None:
    link = AppArgs.model_validate({"link": {"pin_cpu": 2}}).link
    assert [link.for_lane(lane).pin_cpu for lane in range(3)] == [2, 3, 4]
    assert AppArgs().link.for_lane(1).pin_cpu is None


SHIPPED = (ROOT / "configs").glob("*.yaml")
FILES = ["config.yaml", *sorted(f"configs/{path.name}" for path in SHIPPED)]
ON_GPUS = ("qwen3-4b", "qwen3-8b", "qwen3-coder-30b", "llama31-8b")


@pytest.mark.parametrize("name", FILES)
def test_shipped_files_are_valid(name: str) -> None:
    args = read_app_args(ROOT / name)
    on_cuda = args.model.device == "cuda"
    assert on_cuda == name.removeprefix("configs/").startswith(ON_GPUS)
    assert on_cuda or choose_route(args) == ("shm", "alias")


@pytest.mark.parametrize("model", ON_GPUS)
def test_one_gpu_is_shared_and_two_are_not(model: str) -> None:
    one, two = (read_app_args(ROOT / f"configs/{model}{kind}.yaml") for kind in ("", "-2gpu"))
    assert one.model == two.model
    assert one.model.drafter.startswith("z-lab/")
    assert choose_route(one) == ("cuda_ipc", "alias")
    assert bundles(one, choose_placement(one)) == [{"CPU": 2.25, "GPU": 1.0}]
    assert choose_route(two) == ("nixl", "pull")
    assert bundles(two, choose_placement(two)) == [{"CPU": 2.25, "GPU": 2}]
    assert two.features.projected_by == "verifier"
