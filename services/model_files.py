"""What the JSON files beside a model say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_wire.errors import ConfigError


def read_json(path: Path, is_required: bool) -> dict[str, Any]:
    """Return the object that a file holds; an empty one for a file that may be missing, and is.

    Raises:
        ConfigError: the file is broken, or required and missing.
    """
    if not path.is_file():
        if is_required:
            raise ConfigError(f"{path} is missing")
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return values


def end_token_ids(folder: str) -> tuple[int, ...]:
    """Return the ids that end a sequence of the model in ``folder``.

    Raises:
        ConfigError: a config file is missing or broken.
    """
    target = read_json(Path(folder) / "config.json", is_required=True)
    generation = read_json(Path(folder) / "generation_config.json", is_required=False)
    found = generation.get("eos_token_id", target.get("eos_token_id"))
    ids = found if isinstance(found, list) else [] if found is None else [found]
    return tuple(int(token_id) for token_id in ids)
