"""Gateway settings from the JSON files beside the models; reads no weights."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dflash_wire.errors import ConfigError
from gateway.state import GatewaySettings, SamplingDefaults
from services.config import AppArgs
from services.spec import EngineSpec


def _read_json(path: Path, is_required: bool) -> dict[str, Any]:
    if not path.is_file():
        if is_required:
            raise ConfigError(f"{path} is missing")
        return {}
    values: dict[str, Any] = json.loads(path.read_text())
    return values


def _package_version() -> str:
    try:
        return version("dflash-serving")
    except PackageNotFoundError:
        return "0+unknown"


def gateway_settings(args: AppArgs, spec: EngineSpec) -> GatewaySettings:
    """Collect what the gateway must know about the pair.

    Raises:
        ConfigError: a config file is missing.
    """
    target = _read_json(Path(spec.target_path) / "config.json", is_required=True)
    generation = _read_json(Path(spec.target_path) / "generation_config.json", is_required=False)
    draft = _read_json(Path(spec.drafter_path) / "config.json", is_required=True)
    eos = generation.get("eos_token_id", target.get("eos_token_id"))
    eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    nested = draft.get("dflash_config") or {}
    sampling = SamplingDefaults(
        temperature=generation.get("temperature", 1.0)
        if generation.get("do_sample", True)
        else 0.0,
        top_p=generation.get("top_p", 1.0),
        top_k=generation.get("top_k", 0),
    )
    return GatewaySettings(
        model_id=args.model.id,
        max_context=min(args.engine.max_context, int(target["max_position_embeddings"])),
        vocab_size=int(target["vocab_size"]),
        eos_token_ids=tuple(int(i) for i in eos_ids),
        max_draft_block_size=int(nested.get("block_size", draft.get("block_size", 16))),
        default_policy=args.engine.policy,
        version=_package_version(),
        sampling=sampling,
        max_body_bytes=args.gateway.max_body_bytes,
    )
