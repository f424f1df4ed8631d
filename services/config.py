"""The application's arguments: the ``args`` of ``config.yaml``, checked once at start.

Unknown keys are an error that names the key. Nothing here is read from the environment.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from dflash_wire.drafters import DEFAULT_DRAFTER, NO_DRAFTER
from gateway.coordinator.block_scheduler.table_policy import DEFAULT_TABLE, WidthTable

# YAML reads an unquoted off as false.
Policy = Annotated[str, BeforeValidator(lambda value: "off" if value is False else value)]
DrafterName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
DType = Literal["float32", "bfloat16", "float16"]


class Section(BaseModel):
    """Base of all sections: immutable, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelArgs(Section):
    """Which pair is served."""

    id: str = Field("dflash-demo", min_length=1, description="Model name that clients send.")
    target: str = Field("models/demo/target", description="Local folder or hub id of the target.")
    drafter: str = Field(
        "models/demo/drafter",
        description="The drafter named 'default': local folder or hub id of a DFlash or EAGLE-3 checkpoint, "
        "'ngram' for prompt lookup without a model, or 'none' for plain decoding alone.",
    )
    drafters: dict[DrafterName, str] = Field(
        {},
        max_length=15,
        description="More drafters of the target, by the name that requests choose them by: as 'drafter', "
        "but not 'none'.",
    )
    chain_width: int = Field(
        16,
        ge=2,
        le=64,
        description="Longest block, anchor included, of drafters whose checkpoints name none: EAGLE-3 and "
        "'ngram'.",
    )
    ngram_match: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] = Field(
        (2, 8),
        description="Of 'ngram': tokens that must be the same for a place to count, and how many make it as "
        "good as any.",
    )
    thinking_drafter: DrafterName | None = Field(
        None, description="Drafter of chats that switch thinking on and name none."
    )
    non_thinking_drafter: DrafterName | None = Field(
        None, description="Drafter of chats that switch thinking off and name none."
    )
    dtype: DType = Field("float32", description="Compute type of target and drafter.")
    device: Literal["cpu", "cuda"] = Field("cpu", description="Where all models run.")

    @property
    def all_drafters(self) -> dict[str, str]:
        """Name to folder, hub id or 'ngram'; the default one is first. Empty: nobody drafts."""
        if self.drafter == NO_DRAFTER:
            return {}
        return {DEFAULT_DRAFTER: self.drafter, **self.drafters}

    @model_validator(mode="after")
    def _check_names(self) -> ModelArgs:
        for name in (DEFAULT_DRAFTER, NO_DRAFTER):
            if name in self.drafters:
                raise ValueError(f"drafters: {name!r} has a meaning of its own; use another name")
        if NO_DRAFTER in self.drafters.values() or (self.drafters and self.drafter == NO_DRAFTER):
            raise ValueError("drafters: with 'none' there are no others")
        if self.ngram_match[0] > self.ngram_match[1]:
            raise ValueError("ngram_match: the first number is the smaller one")
        for field in ("thinking_drafter", "non_thinking_drafter"):
            name = getattr(self, field)
            if name is not None and name not in self.all_drafters:
                known = ", ".join(self.all_drafters)
                raise ValueError(f"{field}: there is no drafter {name!r}, only {known}")
        return self


class EngineArgs(Section):
    """What one engine group holds and how it drafts."""

    policy: Policy = Field(
        "adaptive",
        description="Default block policy: 'adaptive', 'table', 'static:<w>', 'static-tree:<n>' or 'off'.",
    )
    sampling: Literal["coupled", "rejection"] = Field(
        "coupled",
        description="How drafts are accepted at a temperature, unless a request says otherwise: 'coupled' "
        "gives the same text for a seed whatever the policy, 'rejection' the same distribution.",
    )
    deterministic: bool = Field(
        False,
        description="Numbers are the same to the last bit whatever the policy, the batch and the chunks of "
        "prompts; slower without a compiled kernel. Needs a CPU and a dense model whose weights are packed.",
    )
    kernel_folder: str | None = Field(
        "~/.cache/dflash/kernels",
        description="Where attention for float32 on a CPU is kept, which the system's C compiler makes at "
        "the first start, if there is one. It uses one thread, whatever num_threads says; null takes torch's "
        "operators back, and nothing is compiled.",
    )
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
    graph_memory_mib: int = Field(
        0,
        ge=0,
        description="On a GPU, verify and draft passes are captured as CUDA graphs at their first use until "
        "an executor's hold so much; 0 captures none. Not run on a GPU yet, so check yours first "
        "(make gpu-check); 2048 is ample.",
    )


class BlockSchedulerArgs(Section):
    """How the policies ``adaptive`` and ``table`` choose widths. A width counts the anchor."""

    draft_widths: list[Annotated[int, Field(ge=1, le=1024)]] = Field(
        [2, 4, 6, 8, 12, 16],
        description="Blocks that the drafter may be asked for, as far as it was trained for them.",
    )
    table: list[tuple[int, int]] = Field(
        list(DEFAULT_TABLE),
        description="[most rows, width], ascending; beyond the last entry rows decode plainly. It is the "
        "policy 'table', and what 'adaptive' does while costs are unknown or predictions fail.",
    )
    target_tpot_ms: float | None = Field(
        None,
        gt=0,
        description="Time per output token that every sequence should meet where any width makes it; "
        "drafts are chains then.",
    )
    allows_trees: bool = Field(
        False,
        description="Whether 'adaptive' may draft trees; worth it where passes are bound by memory.",
    )
    sweep_s: float = Field(
        20.0,
        ge=0,
        description="Longest start-up measurement of step costs; 0 leaves it out, and the table decides.",
    )
    cost_folder: str | None = Field(
        "~/.cache/dflash/step-costs",
        description="Where measured step costs are kept for the next start; with null every start measures.",
    )

    @field_validator("table")
    @classmethod
    def _table_ascends(cls, entries: list[tuple[int, int]]) -> list[tuple[int, int]]:
        WidthTable(entries)
        return entries


class ExecutorArgs(Section):
    """Resources of one executor actor."""

    num_cpus: float = Field(0.5, ge=0, description="Ray CPUs reserved for the actor.")
    num_gpus: float = Field(0.0, ge=0, description="Ray GPUs; fractions share one card.")
    num_threads: int = Field(1, ge=1, description="Torch threads when running on CPU.")


class VerifierArgs(ExecutorArgs):
    """Resources of each verifier actor, which is one rank of the target."""

    tensor_parallel: int = Field(
        1,
        ge=1,
        le=64,
        description="Actors that share the target: each has a part of its heads and MLP columns. For "
        "Qwen3 and Llama; num_cpus, num_gpus and num_threads are each one's.",
    )


class DrafterArgs(ExecutorArgs):
    """Resources of each drafter actor, and whom it works for."""

    shared_by: int = Field(
        1,
        ge=1,
        le=64,
        description="Verifiers that share one drafter, each with pools, queue and step loop of its own.",
    )


class FeatureArgs(Section):
    """How target features reach the drafter."""

    transport: Literal["auto", "shm", "cuda_ipc", "nixl"] = Field(
        "auto",
        description="Ray Direct Transport backend; auto: shm on CPU, cuda_ipc on one GPU, nixl (a package of "
        "its own) between GPUs and between nodes.",
    )
    mode: Literal["auto", "alias", "pull"] = Field(
        "auto",
        description="alias: map the pool once, with shm and cuda_ipc; pull: one ray.get of the persistent "
        "reference a step, with shm and nixl; auto: alias where that is possible.",
    )
    projected_by: Literal["drafter", "verifier"] = Field(
        "drafter",
        description="Who applies the drafter's fc and hidden_norm to features; with verifier one row of "
        "hidden size travels per position in place of one per tapped layer. For a single DFlash drafter.",
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

    def for_lane(self, lane: int) -> LinkArgs:
        """The link of one of several verifiers: each has a CPU of its own while there are any."""
        if self.pin_cpu is None or lane == 0:
            return self
        return self.model_copy(update={"pin_cpu": self.pin_cpu + lane})


class GatewayArgs(Section):
    """The HTTP edge."""

    num_replicas: int = Field(1, ge=1, description="Gateway replicas.")
    max_ongoing_requests: int = Field(512, ge=1, description="Open requests per replica.")
    max_body_bytes: int = Field(4 * 1024 * 1024, ge=1024, description="Larger bodies get 413.")
    admin_key: str | None = Field(
        None,
        min_length=16,
        description="Opens /admin/policy and /debug/block_scheduler to who sends it as a bearer token.",
    )
    reasoning_parser: Literal["auto", "none", "think_tags"] = Field(
        "auto", description="How reasoning is found in a chat's output; auto: by the chat template."
    )
    tool_parser: Literal["auto", "none", "hermes", "llama3_json"] = Field(
        "auto", description="How tool calls are found in it; auto: by the chat template."
    )
    trace: bool = Field(
        False, description="Answer GET /trace with the latest steps and chunks (see make trace)."
    )


class RoutingArgs(Section):
    """Which engine group gets a request. Outstanding tokens: to prefill, and expected output."""

    expected_output_tokens: int = Field(
        256,
        ge=1,
        description="Output expected of a running sequence, at most what is left of max_tokens.",
    )
    prefix_weight: float = Field(
        8.0,
        ge=0,
        description="Outstanding tokens that one cached prompt token outweighs; 0 routes by load alone.",
    )
    load_bound_tokens: float = Field(
        4096, ge=0, description="Outstanding tokens that a cached prefix outweighs at most."
    )
    max_known_prefixes: int = Field(
        65536, ge=1, description="Prefixes a gateway remembers, some 350 bytes each."
    )
    prefix_ttl_s: float = Field(
        600.0, gt=0, description="Prefixes unused for so long are forgotten."
    )
    report_period_s: float = Field(
        1.0,
        gt=0,
        description="How often engine groups tell gateways their load and their prefixes.",
    )


class AutoscalingArgs(Section):
    """How the number of engine groups follows the load."""

    min_engine_groups: int = Field(1, ge=1, description="Groups that always run.")
    max_engine_groups: int = Field(ge=1, description="Groups that run at most.")
    target_outstanding_tokens: float = Field(
        8192, gt=0, description="Outstanding tokens per group that the number of groups aims at."
    )
    report_period_s: float = Field(
        5.0, gt=0, description="How often engine groups tell Serve's controller their load."
    )
    look_back_period_s: float = Field(
        10.0, gt=0, description="Load is its mean over this time, longer than report_period_s."
    )
    upscale_delay_s: float = Field(
        10.0, ge=0, description="How long more groups must have been wanted."
    )
    downscale_delay_s: float = Field(
        300.0, ge=0, description="How long fewer groups must have been wanted."
    )
    drain_timeout_s: float = Field(
        600.0, gt=0, description="How long a group that is not wanted may finish its requests."
    )

    @model_validator(mode="after")
    def _bounds_fit(self) -> Self:
        if self.min_engine_groups > self.max_engine_groups:
            raise ValueError("min_engine_groups is larger than max_engine_groups")
        if self.look_back_period_s <= self.report_period_s:
            raise ValueError("look_back_period_s must be longer than report_period_s")
        return self


class AppArgs(Section):
    """Arguments of ``services.app:build``."""

    model: ModelArgs = ModelArgs()
    engine: EngineArgs = EngineArgs()
    block_scheduler: BlockSchedulerArgs = BlockSchedulerArgs()
    verifier: VerifierArgs = VerifierArgs()
    drafter: DrafterArgs = DrafterArgs()
    features: FeatureArgs = FeatureArgs()
    link: LinkArgs = LinkArgs()
    placement: Literal["auto", "same_gpu", "same_node", "spread"] = Field(
        "auto",
        description="Where verifier and drafters of a group run: on one card, on one node, or spread over "
        "nodes as far as there are any (ranks stay together); auto: same_gpu where num_gpus fit one card, "
        "else same_node.",
    )
    gateway: GatewayArgs = GatewayArgs()
    num_engine_groups: int = Field(
        1, ge=1, description="Coordinator replicas, each with verifiers and drafters of its own."
    )
    routing: RoutingArgs = RoutingArgs()
    autoscaling: AutoscalingArgs | None = Field(
        None, description="Replaces num_engine_groups; without it that number is fixed."
    )

    @model_validator(mode="after")
    def _one_number_of_groups(self) -> Self:
        if self.autoscaling is not None and "num_engine_groups" in self.model_fields_set:
            raise ValueError("give num_engine_groups or autoscaling, not both")
        return self
