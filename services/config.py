"""The application's arguments: the ``args`` of ``config.yaml``, checked once at start.

Unknown keys are an error that names the key. Nothing here is read from the environment.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

# YAML reads an unquoted off as false.
Policy = Annotated[str, BeforeValidator(lambda value: "off" if value is False else value)]
DType = Literal["float32", "bfloat16", "float16"]


class Section(BaseModel):
    """Base of all sections: immutable, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelArgs(Section):
    """Which pair is served."""

    id: str = Field("dflash-demo", min_length=1, description="Model name that clients send.")
    target: str = Field("models/demo/target", description="Local folder or hub id of the target.")
    drafter: str = Field(
        "models/demo/drafter", description="Local folder or hub id of the drafter."
    )
    dtype: DType = Field("float32", description="Compute type of target and drafter.")
    device: Literal["cpu", "cuda"] = Field("cpu", description="Where both models run.")


class EngineArgs(Section):
    """What one engine group holds and how it drafts."""

    policy: Policy = Field("static:16", description="Default block policy: 'off' or 'static:<w>'.")
    num_pages: int = Field(2048, ge=2, le=2**24, description="Pages in each of the two pools.")
    page_size: int = Field(16, ge=1, description="Tokens per page.")
    max_rows: int = Field(64, ge=1, description="Sequences that run at the same time.")
    max_waiting: int = Field(256, ge=1, description="Sequences that may wait; more get 429.")
    prefix_cache: bool = Field(
        True, description="Share pages between sequences that begin alike (see cache_salt)."
    )
    cohorts: Literal["auto", 1, 2] = Field(
        "auto",
        description="Steps in flight: with 2 the drafter works on one half of the sequences while the "
        "verifier works on the other; auto measures both and keeps the faster.",
    )
    max_step_positions: int = Field(512, ge=16, description="Packed target positions per step.")
    max_context: int = Field(
        2048, ge=2, description="Longest prompt plus output in tokens; the target's limit caps it."
    )


class ExecutorArgs(Section):
    """Resources of one executor actor."""

    num_cpus: float = Field(0.5, ge=0, description="Ray CPUs reserved for the actor.")
    num_gpus: float = Field(0.0, ge=0, description="Ray GPUs; fractions share one card.")
    num_threads: int = Field(1, ge=1, description="Torch threads when running on CPU.")


class FeatureArgs(Section):
    """How target features reach the drafter."""

    transport: Literal["auto", "shm", "cuda_ipc"] = Field(
        "auto", description="Ray Direct Transport backend; auto: shm on CPU, cuda_ipc on one GPU."
    )
    mode: Literal["alias", "pull"] = Field(
        "alias",
        description="alias: map the pool once; pull: one ray.get of the persistent reference a step.",
    )


class LinkArgs(Section):
    """Control plane between gateway, coordinator and executors."""

    kind: Literal["ipc", "tcp"] = Field(
        "ipc", description="ipc when all processes share a node, tcp when they may not."
    )
    pin_cpu: int | None = Field(
        None,
        ge=0,
        description="Run the step threads of coordinator, drafter and verifier on one CPU: this index "
        "into the allowed ones, modulo their number. They work one after another, so a step then never "
        "waits for another CPU to wake up; with two cohorts the drafter takes the next CPU. For models on "
        "CPU.",
    )
    spin_ms: float = Field(
        0.0,
        ge=0,
        description="How long executors and coordinator look for the next message before they sleep; "
        "they yield the CPU while they look. An alternative to pin_cpu where CPUs are plenty.",
    )
    step_timeout_s: float = Field(
        120.0, gt=0, description="A step that takes longer means a lost executor."
    )


class GatewayArgs(Section):
    """The HTTP edge."""

    num_replicas: int = Field(1, ge=1, description="Gateway replicas.")
    max_ongoing_requests: int = Field(512, ge=1, description="Open requests per replica.")
    max_body_bytes: int = Field(4 * 1024 * 1024, ge=1024, description="Larger bodies get 413.")


class AppArgs(Section):
    """Arguments of ``services.app:build``."""

    model: ModelArgs = ModelArgs()
    engine: EngineArgs = EngineArgs()
    verifier: ExecutorArgs = ExecutorArgs()
    drafter: ExecutorArgs = ExecutorArgs()
    features: FeatureArgs = FeatureArgs()
    link: LinkArgs = LinkArgs()
    gateway: GatewayArgs = GatewayArgs()
    num_engine_groups: int = Field(
        1, ge=1, description="Coordinator replicas, each with its own verifier and drafter."
    )
