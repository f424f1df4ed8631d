"""Gateway settings from the JSON files beside the models; reads no weights."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dflash_wire.drafters import DrafterLimits, default_drafter
from dflash_wire.errors import ConfigError, InvalidRequestError
from dflash_wire.ports import MAX_TREE_POSITIONS
from gateway.coordinator.policy import parse_policy
from gateway.state import GatewaySettings, SamplingDefaults
from services.config import AppArgs
from services.drafter_kinds import DrafterKind, flat_config, trained_block_size
from services.model_files import end_token_ids, read_json
from services.spec import DrafterSpec, EngineSpec


def _package_version() -> str:
    try:
        return version("dflash-serving")
    except PackageNotFoundError:
        return "0+unknown"


def _check_pair(target: dict[str, Any], draft: dict[str, Any], drafter: DrafterSpec) -> None:
    """Find what the two config files already show; the executors check the rest when they load."""
    marks = {"dflash_config", "num_target_layers", "speculators_model_type"}
    if drafter.kind is DrafterKind.DFLASH and not marks & set(draft):
        raise ConfigError(
            f"{drafter.path} holds no DFlash drafter: its config.json has no dflash_config"
        )
    for name, of_target in (
        ("hidden_size", "hidden_size"),
        ("vocab_size", "vocab_size"),
        ("num_target_layers", "num_hidden_layers"),
    ):
        ours, theirs = target.get(of_target), draft.get(name)
        if None not in (ours, theirs) and ours != theirs:
            raise ConfigError(
                f"target and drafter do not match: {of_target} is {ours} in the target and {name} "
                f"is {theirs} in the drafter"
            )


def _check_policy(policy: str, max_draft_block_size: int, max_tree_positions: int) -> None:
    try:
        parse_policy(policy, max_draft_block_size, max_tree_positions)
    except InvalidRequestError as error:
        raise ConfigError(f"engine.policy: {error}") from error


def _drafter_limits(
    target: dict[str, Any], drafter: DrafterSpec, chain_width: int
) -> DrafterLimits:
    size = chain_width
    if drafter.path:
        draft = flat_config(read_json(Path(drafter.path) / "config.json", is_required=True))
        _check_pair(target, draft, drafter)
        if not drafter.kind.is_chain:
            size = trained_block_size(draft)
    return DrafterLimits(drafter.name, size, drafter.kind.reads_tokens)


def gateway_settings(args: AppArgs, spec: EngineSpec) -> GatewaySettings:
    """Collect what the gateway must know about the target and its drafters.

    Raises:
        ConfigError: a config file is missing or broken, a drafter does not fit, or the default policy is
            not one of every drafter's.
    """
    target = read_json(Path(spec.target_path) / "config.json", is_required=True)
    generation = read_json(Path(spec.target_path) / "generation_config.json", is_required=False)
    drafters = tuple(
        _drafter_limits(target, drafter, spec.chain_width) for drafter in spec.drafters
    )
    most_nodes = min(MAX_TREE_POSITIONS, spec.max_step_positions)
    for drafter in drafters or default_drafter(1):
        _check_policy(args.engine.policy, drafter.max_draft_block_size, most_nodes)
    sampling = SamplingDefaults(
        temperature=generation.get("temperature", 1.0)
        if generation.get("do_sample", True)
        else 0.0,
        top_p=generation.get("top_p", 1.0),
        top_k=generation.get("top_k", 0),
        min_p=generation.get("min_p") or 0.0,
        repetition_penalty=generation.get("repetition_penalty") or 1.0,
        rejects=args.engine.sampling == "rejection",
    )
    return GatewaySettings(
        model_id=args.model.id,
        max_context=spec.longest_sequence(int(target["max_position_embeddings"])),
        vocab_size=int(target["vocab_size"]),
        eos_token_ids=end_token_ids(spec.target_path),
        max_draft_block_size=max((d.max_draft_block_size for d in drafters), default=1),
        max_tree_positions=most_nodes,
        drafters=drafters,
        thinking_drafter=args.model.thinking_drafter,
        non_thinking_drafter=args.model.non_thinking_drafter,
        default_policy=args.engine.policy,
        admin_key=args.gateway.admin_key,
        reasoning_parser=args.gateway.reasoning_parser,
        tool_parser=args.gateway.tool_parser,
        version=_package_version(),
        sampling=sampling,
        max_body_bytes=args.gateway.max_body_bytes,
    )
