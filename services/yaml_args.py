"""Reads the application's arguments out of a Serve config file, for tools that run without Serve."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import ValidationError

from dflash_wire.errors import ConfigError
from services.config import AppArgs

IMPORT_PATH = "services.app:build"


def read_app_args(config: Path) -> AppArgs:
    """Return the ``args`` of the first DFlash application in ``config``.

    Raises:
        ConfigError: the file has no such application, or its arguments are wrong.
    """
    try:
        applications = yaml.safe_load(config.read_text()).get("applications", [])
    except (OSError, yaml.YAMLError, AttributeError) as error:
        raise ConfigError(f"cannot read {config}: {error}") from error
    for application in applications:
        if application.get("import_path") == IMPORT_PATH:
            try:
                return AppArgs.model_validate(application.get("args") or {})
            except ValidationError as error:
                raise ConfigError(f"{config}: {error}") from error
    raise ConfigError(f"{config} has no application with import_path {IMPORT_PATH}")
